"""What is done with datasets: convert, verify, reindex, describe. They print nothing."""
