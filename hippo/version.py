"""The version and address of the installed distribution."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

ADDRESS = "https://pypi.org/project/hippo-serve/"


@cache
def distribution_version() -> str:
    """Returns the version of the installed distribution."""
    try:
        return version("hippo-serve")
    except PackageNotFoundError:  # run from a source folder that is not installed
        return "0+unknown"
