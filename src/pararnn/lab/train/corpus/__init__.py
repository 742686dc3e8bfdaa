"""Text as rows of tokens: files and datasets, tokenizers, packed rows kept on disk."""
