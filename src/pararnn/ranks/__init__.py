"""Context parallelism: one sequence over several ranks, each of which holds a span of time."""
