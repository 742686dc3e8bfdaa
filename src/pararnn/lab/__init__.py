"""What is built around the library: training, tasks, evaluation, comparing, serving, commands."""
