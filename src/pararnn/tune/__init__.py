"""Choice of `auto`: `explain` shows and predicts, `autotune` measures, `adapt` follows the data."""
