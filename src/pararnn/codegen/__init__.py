"""From a Program's graphs to compiled code: spelling, emission, compilation."""
