"""Reinforcement learning (GRPO) whose sampler and trainer say the same, to the bit.

The model is to repeat its prompt. The sampler draws token by token, prompt by prompt; the trainer
packs all texts into one row. With batch_invariant=True both compute a token's log-probability with
the same bits: in the first of an update's steps the ratio of policies is 1.0 exactly. main()
returns how far the ratios were from 1 and the reward reached, with the option and without.
"""

from dataclasses import replace

import torch

import pararnn
from pararnn.lm import LanguageModel, LMConfig, sample

PROMPTS, SAMPLES, LENGTH, CLIP, STEPS = 24, 3, 4, 0.2, 2
CONFIG = LMConfig(64, 2, vocab_size=8, intermediate_size=128, batch_invariant=True)


def draw(model, generator):
    """Draw texts, their tokens' log-probabilities, their advantages, and the mean reward."""
    prompts = torch.randint(8, (PROMPTS, 1), generator=generator).repeat_interleave(SAMPLES, 0)
    options = {"generator": generator, "return_log_probs": True}
    draws = [sample(model, group, LENGTH, **options) for group in prompts.split(SAMPLES)]
    tokens, old = (torch.cat(many) for many in zip(*draws, strict=True))
    rewards = (tokens == prompts).float().mean(1).view(PROMPTS, SAMPLES)
    gains = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-3)
    return torch.cat([prompts, tokens], 1), old, gains.view(-1, 1), rewards.mean().item()


def train(config, updates):
    """Train; return the largest distance of a ratio from 1 in first steps, and the last reward."""
    torch.manual_seed(0)
    model, generator, distance = LanguageModel(config), torch.Generator().manual_seed(0), 0.0
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    pararnn.clip_after_step(optimizer, model)
    for _ in range(updates):
        texts, old, gains, reward = draw(model, generator)
        borders = torch.arange(len(texts) + 1) * texts.shape[1]
        for step in range(STEPS):
            new = model.log_probs(texts.view(1, -1), cu_seq_lens=borders).view_as(texts)[:, 1:]
            ratio = (new - old).exp()
            distance = max(distance, (ratio - 1).abs().max().item() if step == 0 else 0)
            loss = -torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return distance, reward


def main(updates=50):
    """Train with the option and without; return the distance from 1 and the reward of both."""
    return train(CONFIG, updates), train(replace(CONFIG, batch_invariant=False), updates)


if __name__ == "__main__":
    print("distance from 1, reward: with the option {}, without {}".format(*main()))
