"""What `auto` takes: said by `explain`, measured by `autotune`, seen in the data by `adapt`."""
