// A .cu file is compiled in one language a folder: here as C++, for the emulation.
#include "tests/gpu/bench/model_kernels.cu"
