"""What holds for all tests."""

from tests.fuzzing import register_profiles

register_profiles()
