"""The kind ``keypoints``: points in pixels of the image, with COCO's visibility."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.geometry import Frame, Geometry, move_points, swap_sides
from shardkit.kinds.field import Field, Kind, Need, Packed
from shardkit.kinds.values import as_numpy, pack_coordinates, parse_json


class _Keypoints(Kind):
    name = "keypoints"
    classes = Need.OPTIONAL
    class_nouns = ("point", "points")
    is_named_so = True
    follows = True
    column_type = np.dtype("<f8")
    is_variable = True

    def check(self, field: Field) -> None:
        """Refuse objects without points."""
        if field.classes == ():
            raise ValueError("an object has at least one keypoint: leave out the classes")

    def pack(self, name: str, field: Field, value: Any) -> tuple[None, Any]:
        """Return x, y and visibility of each point; points without a visibility are visible."""
        points = np.asarray(as_numpy(value), np.float64)
        points = points.reshape(0, 3) if not points.size else points
        if points.ndim > 1 and points.shape[-1] == 2:
            points = np.concatenate([points, np.full_like(points[..., :1], 2)], axis=-1)
        if not np.isfinite(points).all():
            raise ValueError("a number of a keypoint is NaN or infinite; use 0, 0, 0 for none")
        if points.ndim < 2 or points.shape[-1] != 3:
            raise ValueError(
                "each keypoint is x, y and optionally a visibility, not an array of shape "
                f"{points.shape}: use numpy.reshape(points, (-1, 3)) for COCO's lists"
            )
        points = points.reshape(-1, 3)
        if not np.isin(points[:, 2], (0, 1, 2)).all():
            raise ValueError("the visibility of a keypoint is 0, 1 or 2, as in COCO")
        if len(points) % len(field.classes or ("",)):
            raise ValueError(
                f"{len(points)} keypoints cannot form objects of {len(field.classes or ())} points"
            )
        return None, [[x, y, int(visibility)] for x, y, visibility in points.tolist()]

    def parse(self, field: Field, data: bytes) -> Any:
        """Return the keypoints in a JSON file."""
        return parse_json(data)

    def width(self, field: Field) -> int:
        """Return the numbers of an object: three for each of its points."""
        return 3 * len(field.classes or ("",))

    def pack_column(self, field: Field, value: Any) -> Packed:
        """Return x, y and visibility of each point as float64."""
        numbers: list[float] = []
        for point in value:
            if len(point) != 3 or type(point[2]) is not int or not 0 <= point[2] <= 2:
                raise ValueError(
                    f"{str(point)[:60]} is not a keypoint: use x, y, and a visibility of 0, 1 or 2"
                )
            numbers += point
        if len(numbers) % self.width(field):
            raise ValueError(
                f"{len(value)} keypoints cannot form objects of {len(field.classes or ())}"
            )
        return Packed(pack_coordinates(numbers))

    def unpack(
        self, field: Field, values: npt.NDArray[Any], labels: npt.NDArray[np.int32] | None
    ) -> Any:
        """Return float64 of shape (N, 3), or (objects, points, 3) if the points have names."""
        shape = (3,) if field.classes is None else (len(field.classes), 3)
        return values.reshape(-1, *shape)

    def move(self, field: Field, value: Any, geometry: Geometry) -> tuple[Any, bool]:
        """Return the points, (0, 0, 0) outside the canvas, and whether that lost any."""
        names = field.classes or ("",)
        points = np.array(value, np.float64).reshape(-1, 3)
        points[:, :2] = geometry.upright(points[:, [0, 1, 0, 1]])[:, :2]
        objects = points.reshape(-1, len(names), 3)
        if geometry.is_mirrored:
            objects = swap_sides(objects, names)
        moved = move_points(objects, geometry.frame).reshape(-1, 3)
        shown = [[x, y, int(visibility)] for x, y, visibility in moved.tolist()]
        before, after = (sum(point[2] > 0 for point in points) for points in (value, shown))
        return shown, after < before

    def sample(self, field: Field, value: Any, frame: Frame | None) -> Any:
        """Return the points in a frame."""
        return value if frame is None else move_points(value, frame, field.classes)


KIND = _Keypoints()
