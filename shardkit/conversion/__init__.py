"""How a dataset comes to be: the plan, the shards one by one, and the place they grow in."""
