"""Choice of `auto`: `explain` shows it, `autotune` measures it, `adapt` follows the data."""
