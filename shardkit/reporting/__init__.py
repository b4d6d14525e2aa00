"""Reports on the content of datasets: facts of each image, findings, and a page."""
