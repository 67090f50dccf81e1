# Enables the CUDA language as PQCACHED_CUDA requests, and sets PQCACHED_CUDA_ENABLED to whether it
# is enabled.
#
# AUTO enables it where nvcc is found. CMAKE_CUDA_ARCHITECTURES defaults to 90: machine code and PTX
# for it.
set(PQCACHED_CUDA AUTO CACHE STRING "CUDA side of kernels and gpu: ON, OFF, or AUTO (where nvcc is found)")
set(PQCACHED_CUDA_ENABLED OFF)
if(PQCACHED_CUDA STREQUAL "AUTO")
  find_program(PQCACHED_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda/bin)
  mark_as_advanced(PQCACHED_NVCC)
endif()
if(PQCACHED_CUDA STREQUAL "AUTO" AND CMAKE_CROSSCOMPILING)
  message(STATUS "CUDA: left out of a cross build")
elseif(PQCACHED_CUDA STREQUAL "AUTO" AND NOT PQCACHED_NVCC)
  message(STATUS "CUDA: no nvcc found, its side is left out")
elseif(PQCACHED_CUDA)
  if(PQCACHED_NVCC AND NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${PQCACHED_NVCC})
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  # CMake 3.25 does not know this flag for nvcc 13 and would silently omit it.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA_STANDARD 20)
  set(PQCACHED_CUDA_ENABLED ON)
endif()
