"""Plan a dataset, build its shards in a staging directory, and publish it."""
