"""Write the records of a dataset as ordinary files: folders of images, tables, tar archives."""
