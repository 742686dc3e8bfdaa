"""Choice of `auto`: `explain` shows and predicts it, `autotune` measures it, `adapt` follows the data."""
