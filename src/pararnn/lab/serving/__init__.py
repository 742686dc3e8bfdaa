"""A server of language models: a running batch, a queue, and OpenAI's completions protocol."""
