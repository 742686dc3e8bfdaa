// Multiple shooting. Time is split into segments; the unknowns are the states at their starts.
// 1. A first sweep runs every segment from a guess: the state after a burn-in from zero. If every segment
//    ends where the next one starts, to rounding, the segments of a vector of channels are one trajectory,
//    and the vector is done.
// 2. Otherwise starts are set to those ends, and the segments whose start moved run again. This is enough for
//    channels that forget within a segment.
// 3. The others need Newton: all segments also accumulate the product of their Jacobians, and starts move by
//    these products. The first two sweeps leave this out, as it costs too much.
// Every sweep makes at least one more segment exact. If Newton does not converge, the rest of the vector runs
// one step after the other. The backward pass does the same on a linear recurrence.
//
// Decisions depend on values only, never on threads or tasks.
//
// The CUDA kernels accept, stop and rerun by other policies (cuda/elementwise/acceptance.h says which). Here
// a task that gives up finishes one vector of channels sequentially while other tasks go on, so giving up
// early is cheap: no gap stays, rounding is not sampled again, and whole segments run again. Products of
// Jacobians cost a large fraction of a sweep, so the first two sweeps leave them out, and tolerances use the
// Jacobian of a segment's first step instead of its gain.
#pragma once
#include "backward.h"
#include "forward.h"
#include "shooting.h"

namespace pararnn {

// A tile of channels whose segments do not meet yet.
struct OpenTile {
  int64_t tile;
  scalar distance;          // the largest, in tolerances
  std::vector<char> moves;  // by segment: true if its start has moved since it ran
};

// Segments of a tile that one task runs side by side.
struct Job {
  int64_t tile;
  int count;
  int64_t segments[max_vectors];
};

// Groups segments into jobs, as many side by side as leave every thread a job.
inline std::vector<Job> jobs_for(const std::vector<OpenTile>& open, int64_t most, int64_t threads) {
  int64_t moved = 0;
  for (const OpenTile& own : open) moved += std::count(own.moves.begin(), own.moves.end(), 1);
  const int64_t side = std::max<int64_t>(1, std::min(most, moved / threads));
  std::vector<Job> jobs;
  for (const OpenTile& own : open)
    for (size_t w = 0; w < own.moves.size(); ++w) {
      if (!own.moves[w]) continue;
      if (jobs.empty() || jobs.back().tile != own.tile || jobs.back().count == side)
        jobs.push_back({own.tile, 0, {}});
      jobs.back().segments[jobs.back().count++] = w;
    }
  return jobs;
}

template <class Pass, class Observer>
void sweep_segments(const Pass& pass, const Shooting& s, const Tile& tile, const int64_t* segments,
                    int count, int64_t burn_in, Chains<num_states>& state, Observer& observer) {
  Span spans[max_vectors];
  int64_t slots[max_vectors];
  for (int i = 0; i < count; ++i) {
    const int64_t first = segments[i] * s.size;
    spans[i] = {std::max<int64_t>(0, first - burn_in), first,
                std::min(first + s.size, pass.problem.length)};
    slots[i] = tile.row * s.segments + segments[i];
  }
  pass.sweep(tile, spans, typename Pass::Count(count), state, observer, slots);
  for (int i = 0; i < count; ++i) {
    s.write(s.ends, tile, segments[i], state + i * tile.vectors());
    s.write(s.sizes, tile, segments[i], observer.size + i * tile.vectors());
  }
}

template <class Pass>
void run_guessed(const Pass& pass, const Shooting& s, const Tile& tile, const Job& job) {
  Chains<num_states> state = {};
  Guess guess;
  sweep_segments(pass, s, tile, job.segments, job.count, s.burn_in, state, guess);
  for (int i = 0; i < job.count; ++i)
    s.write(s.starts, tile, job.segments[i], guess.start + i * tile.vectors());
}

template <class Observer, class Pass>
void run_moved(const Pass& pass, const Shooting& s, const Tile& tile, const Job& job) {
  Chains<num_states> state;
  Observer observer;
  for (int i = 0; i < job.count; ++i)
    s.read_states(s.starts, tile, job.segments[i], state + i * tile.vectors());
  sweep_segments(pass, s, tile, job.segments, job.count, 0, state, observer);
  if constexpr (Observer::jacobians)
    for (int i = 0; i < job.count; ++i)
      s.write(s.products, tile, job.segments[i], observer.product + i * tile.vectors());
}

// Runs a tile sequentially from its first segment that moves. Skips later segments that already fit.
template <class Pass>
void run_sequentially(const Pass& pass, const Shooting& s, const Tile& tile,
                      const std::vector<char>& moves) {
  Chains<num_states> state;
  Guess none;
  int64_t w = std::find(moves.begin(), moves.end(), 1) - moves.begin();
  s.read_states(s.starts, tile, w, state);
  while (w < s.segments) {
    sweep_segments(pass, s, tile, &w, 1, 0, state, none);
    for (++w; w < s.segments && !moves[w] && !(distance_at(pass, s, tile, w, state) > 1); ++w)
      s.read_states(s.ends, tile, w, state);
  }
}

// Returns all tiles, with every segment to run.
inline std::vector<OpenTile> all_open(const Tiles& tiles, const Shooting& s) {
  std::vector<OpenTile> open;
  for (int64_t i = 0; i < tiles.count(); ++i)
    open.push_back({i, infinity, std::vector<char>(s.segments, 1)});
  return open;
}

// Moves starts and returns the tiles that are still open. Tiles that make too little progress go to `stalled`.
template <class Pass>
std::vector<OpenTile> still_open(std::vector<OpenTile> open, const Pass& pass, const Shooting& s,
                                 const Tiles& tiles, std::vector<OpenTile>& stalled) {
  const Problem& p = pass.problem;
  const int64_t threads = threads_for(p, open.size() * s.segments * tiles.each);
  std::vector<scalar> far(open.size());
  run_tasks(open.size(), threads, p.openmp, [&](int64_t i) {
    far[i] = move_starts(pass, s, tiles[open[i].tile], open[i].moves.data());
  });
  std::vector<OpenTile> again;
  for (size_t i = 0; i < open.size(); ++i) {
    if (!(far[i] > 1)) continue;
    const bool nearer = far[i] <= enough_progress * open[i].distance;
    open[i].distance = far[i];
    (nearer ? again : stalled).push_back(std::move(open[i]));
  }
  return again;
}

// Runs all segments that have moved: run_job(pass, s, tile, job).
template <class Pass, class Run>
void run_open(const Pass& pass, const Shooting& s, const Tiles& tiles, const std::vector<OpenTile>& open,
              const Run& run_job) {
  const Problem& p = pass.problem;
  constexpr int chains = std::is_same<typename Pass::Count, One>::value ? 1 : min_vectors;
  const int64_t threads = threads_for(p, open.size() * p.length * tiles.each);
  const std::vector<Job> jobs = jobs_for(open, std::max(1, chains / tiles.vectors()), threads);
  run_tasks(jobs.size(), threads, p.openmp,
            [&](int64_t i) { run_job(pass, s, tiles[jobs[i].tile], jobs[i]); });
}

// Returns the number of segments of a row.
template <class Pass> int64_t run(const Pass& pass, const typename Pass::Launch& launch) {
  const Problem& p = pass.problem;
  const Shooting s{launch.shooting};
  const int64_t vectors = Tiles::vectors_of(p);
  // Guesses run several vectors together. Afterwards each vector decides for itself.
  const Tiles wide_tiles(p, (vectors + min_vectors - 1) / min_vectors), tiles(p, vectors);
  run_open(pass, s, wide_tiles, all_open(wide_tiles, s), run_guessed<Pass>);
  std::vector<OpenTile> stalled, open = still_open(all_open(tiles, s), pass, s, tiles, stalled);
  int64_t sweeps = 1;
  const int64_t unfit = open.size();  // after the first sweep
  for (; !open.empty(); ++sweeps) {
    for (OpenTile& own : open) {
      if (sweeps <= 2) own.distance = infinity;  // distances before Newton say nothing about its progress
      if (sweeps == 2) std::fill(own.moves.begin() + 1, own.moves.end(), 1);
    }
    run_open(pass, s, tiles, open, sweeps == 1 ? run_moved<Guess, Pass> : run_moved<Linear, Pass>);
    open = still_open(std::move(open), pass, s, tiles, stalled);
  }
  s.info[0] = sweeps + !stalled.empty();
  s.info[1] = unfit;
  run_tasks(stalled.size(), threads_for(p, stalled.size() * p.length * tiles.each), p.openmp,
            [&](int64_t i) { run_sequentially(pass, s, tiles[stalled[i].tile], stalled[i].moves); });
  return s.segments;
}

}  // namespace pararnn

#include "entries.h"
