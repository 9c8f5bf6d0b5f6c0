"""Packs the top-level folder `golden/` as `conformance/golden`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["conformance*", "backends*"]), "conformance.golden"],
    package_dir={"conformance.golden": "golden"},
    package_data={"conformance.golden": ["*.gguf", "*.json", "captured/*.gguf"]},
)
