"""Training: recipes, a loop, its data and its folder, sweeps, and the demo."""
