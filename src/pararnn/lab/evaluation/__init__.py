"""Evaluation: texts by their perplexity, tasks by lm-eval-harness, and the paper's figures."""
