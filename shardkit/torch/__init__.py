"""The PyTorch side: datasets and how their samples become batches."""
