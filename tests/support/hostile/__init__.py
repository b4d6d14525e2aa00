"""The catalog of hostile input, for unit tests, campaigns and fuzzing.

- `images`: odd and damaged image files, each with its expected outcome
- `forging`: consistent datasets with wrong content
- `damage`: damage to datasets by disks, copies and users, each with the expected findings
- `bombs`: small files that need much memory or time
- `foreign_shards`: files of other programs, written byte by byte
"""
