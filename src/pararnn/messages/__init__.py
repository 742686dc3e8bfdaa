"""Messages between ranks: which ranks there are, shifts to neighbours, sharding, gathering."""
