// Multiple shooting: time is cut into segments, and the unknowns are the states that they start from. A
// first sweep runs every segment from a guess, the state that a burn-in of some steps reaches from zero.
// Where the end of each segment is the start of the next, to rounding, a vector of channels is done: its
// segments are one trajectory. Else starts become those ends, and the segments whose start has moved run
// again, which is enough for channels that forget within a segment. The rest needs Newton: all segments
// multiply up their Jacobians, which cost too much to do so before, and by these products starts move.
// Every sweep makes one more segment exact, at least; where Newton does not come nearer, the rest of the
// vector runs one step after the other. The backward pass is the same on a linear recurrence.
//
// What is decided depends on values only: threads and tasks do not change it.
#pragma once
#include "backward.h"
#include "forward.h"
#include "shooting.h"

namespace pararnn {

// A tile of channels, while its segments do not meet.
struct Open {
  int64_t tile;
  scalar distance;          // the largest, over what is allowed
  std::vector<char> moved;  // by segment: whether its start has, since it ran
};

// Segments of a tile that a task runs side by side.
struct Job {
  int64_t tile;
  int count;
  int64_t segments[max_vectors];
};

// As many segments side by side as leave no thread without a job.
inline std::vector<Job> jobs_for(const std::vector<Open>& open, int64_t most, int64_t threads) {
  int64_t moved = 0;
  for (const Open& own : open) moved += std::count(own.moved.begin(), own.moved.end(), 1);
  const int64_t side = std::max<int64_t>(1, std::min(most, moved / threads));
  std::vector<Job> jobs;
  for (const Open& own : open)
    for (size_t w = 0; w < own.moved.size(); ++w) {
      if (!own.moved[w]) continue;
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

// Runs what is left of a tile, from its first moved segment on, one step after the other; segments that
// fit already are left out.
template <class Pass>
void run_alone(const Pass& pass, const Shooting& s, const Tile& tile, const std::vector<char>& moved) {
  Chains<num_states> state;
  Guess none;
  int64_t w = std::find(moved.begin(), moved.end(), 1) - moved.begin();
  s.read_states(s.starts, tile, w, state);
  while (w < s.segments) {
    sweep_segments(pass, s, tile, &w, 1, 0, state, none);
    for (++w; w < s.segments && !moved[w] && !(distance_at(pass, s, tile, w, state) > 1); ++w)
      s.read_states(s.ends, tile, w, state);
  }
}

// All tiles, with all their segments to run.
inline std::vector<Open> all_open(const Tiles& tiles, const Shooting& s) {
  std::vector<Open> open;
  for (int64_t i = 0; i < tiles.count(); ++i)
    open.push_back({i, infinity, std::vector<char>(s.segments, 1)});
  return open;
}

// Compares ends and starts and moves starts. Tiles whose segments meet are no longer open; those that
// come no nearer go to `alone`.
template <class Pass>
std::vector<Open> still_open(std::vector<Open> open, const Pass& pass, const Shooting& s,
                             const Tiles& tiles, std::vector<Open>& alone) {
  const Problem& p = pass.problem;
  const int64_t threads = threads_for(p, open.size() * s.segments * tiles.each);
  std::vector<scalar> far(open.size());
  run_tasks(open.size(), threads, p.openmp, [&](int64_t i) {
    far[i] = move_starts(pass, s, tiles[open[i].tile], open[i].moved.data());
  });
  std::vector<Open> again;
  for (size_t i = 0; i < open.size(); ++i) {
    if (!(far[i] > 1)) continue;
    const bool nearer = far[i] <= enough_progress * open[i].distance;
    open[i].distance = far[i];
    (nearer ? again : alone).push_back(std::move(open[i]));
  }
  return again;
}

// Runs what open tiles have to run: run_job(pass, s, tile, job).
template <class Pass, class Run>
void run_open(const Pass& pass, const Shooting& s, const Tiles& tiles, const std::vector<Open>& open,
              const Run& run_job) {
  const Problem& p = pass.problem;
  constexpr int chains = std::is_same<typename Pass::Count, One>::value ? 1 : min_vectors;
  const int64_t threads = threads_for(p, open.size() * p.length * tiles.each);
  const std::vector<Job> jobs = jobs_for(open, std::max(1, chains / tiles.vectors()), threads);
  run_tasks(jobs.size(), threads, p.openmp,
            [&](int64_t i) { run_job(pass, s, tiles[jobs[i].tile], jobs[i]); });
}

// Returns the segments that a row is cut into.
template <class Pass> int64_t run(const Pass& pass, const typename Pass::Launch& launch) {
  const Problem& p = pass.problem;
  const Shooting s{launch.shooting};
  const int64_t vectors = Tiles::vectors_of(p);
  // Guesses run several vectors together; from then on each decides for itself.
  const Tiles wide_tiles(p, (vectors + min_vectors - 1) / min_vectors), tiles(p, vectors);
  run_open(pass, s, wide_tiles, all_open(wide_tiles, s), run_guessed<Pass>);
  std::vector<Open> alone, open = still_open(all_open(tiles, s), pass, s, tiles, alone);
  int64_t sweeps = 1;
  const int64_t unfit = open.size();  // after the first sweep
  for (; !open.empty(); ++sweeps) {
    for (Open& own : open) {
      if (sweeps <= 2) own.distance = infinity;  // what came before says nothing about Newton
      if (sweeps == 2) std::fill(own.moved.begin() + 1, own.moved.end(), 1);
    }
    run_open(pass, s, tiles, open, sweeps == 1 ? run_moved<Guess, Pass> : run_moved<Linear, Pass>);
    open = still_open(std::move(open), pass, s, tiles, alone);
  }
  s.info[0] = sweeps + !alone.empty();
  s.info[1] = unfit;
  run_tasks(alone.size(), threads_for(p, alone.size() * p.length * tiles.each), p.openmp,
            [&](int64_t i) { run_alone(pass, s, tiles[alone[i].tile], alone[i].moved); });
  return s.segments;
}

}  // namespace pararnn

#include "entries.h"
