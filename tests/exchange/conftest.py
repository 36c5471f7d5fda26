from hypothesis import settings

# The first call of a kernel compiles it, or loads it from numba's cache, which no deadline allows for.
settings.register_profile("exchange", deadline=None)
settings.load_profile("exchange")
