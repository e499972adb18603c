# The CUDA backend: src/*/*.cu as objects that both libraries take in, when a CUDA compiler is there.
#
# After this, CRISP_WITH_CUDA says whether the build has it, and CRISP_CUDA_OBJECTS names the objects.
set(CRISP_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO (if a CUDA compiler is found), ON, OFF")
set_property(CACHE CRISP_CUDA PROPERTY STRINGS AUTO ON OFF)
# Machine code for the cards in use, and PTX that a driver compiles for any later one.
set(CRISP_CUDA_ARCHITECTURES "80-real;86-real;89-real;90-real;90-virtual" CACHE STRING
  "What every .cu but *_sm90.cu is compiled for")
set(CRISP_WITH_CUDA OFF)
set(CRISP_CUDA_OBJECTS)

if(NOT CRISP_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CRISP_CUDA is '${CRISP_CUDA}', must be AUTO, ON or OFF")
endif()
if(CRISP_CUDA STREQUAL "OFF")
  message(STATUS "CUDA backend: off (CRISP_CUDA=OFF)")
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(CRISP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CRISP_CUDA is ON, but no CUDA compiler was found: put nvcc on PATH or set CUDACXX")
  endif()
  message(STATUS "CUDA backend: off (no CUDA compiler found)")
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES ${CRISP_CUDA_ARCHITECTURES})
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.3)
  message(FATAL_ERROR "CUDA is ${CMAKE_CUDA_COMPILER_VERSION}, must be at least 12.3; CRISP_CUDA=OFF builds without")
endif()
set(CRISP_WITH_CUDA ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
if(PROJECT_IS_TOP_LEVEL AND CRISP_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CRISP_CCACHE})
endif()

# CMake 3.25 does not know that CUDA has a C++20, which CMAKE_CXX_STANDARD asks of .cu files as well.
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()

# How every CUDA file is compiled. A kernel that spills or uses local memory is slow in a way that no
# test shows, so ptxas refuses it.
add_library(crisp_cuda_options INTERFACE)
target_compile_options(crisp_cuda_options INTERFACE
  "SHELL:-Xptxas --warn-on-spills,--warn-on-local-memory-usage,--warning-as-error"
  -Xcompiler=-fvisibility-inlines-hidden -Xcompiler=-Wall,-Wextra$<$<BOOL:${CRISP_WERROR}>:,-Werror>
  "$<$<BOOL:${CRISP_WERROR}>:SHELL:-Werror all-warnings>")
target_compile_definitions(crisp_cuda_options INTERFACE CRISP_WITH_CUDA)

# crisp_add_cuda(NAME ARCHITECTURES SOURCES...): an object library of those .cu files.
function(crisp_add_cuda name architectures)
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE crisp_cuda_options)
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}"
    CUDA_RUNTIME_LIBRARY None)  # whoever links the objects links the runtime, once
endfunction()

# wgmma and the rest of sm_90a do not compile for anything else, hence a library per family.
file(GLOB CRISP_CUDA_SOURCES CONFIGURE_DEPENDS src/*/*.cu)
set(CRISP_SM90_SOURCES ${CRISP_CUDA_SOURCES})
list(FILTER CRISP_SM90_SOURCES INCLUDE REGEX "_sm90\\.cu$")
list(FILTER CRISP_CUDA_SOURCES EXCLUDE REGEX "_sm90\\.cu$")
if(CRISP_CUDA_SOURCES)
  crisp_add_cuda(crisp_cuda "${CRISP_CUDA_ARCHITECTURES}" ${CRISP_CUDA_SOURCES})
  list(APPEND CRISP_CUDA_OBJECTS $<TARGET_OBJECTS:crisp_cuda>)
endif()
if(CRISP_SM90_SOURCES)
  crisp_add_cuda(crisp_cuda_sm90 90a-real ${CRISP_SM90_SOURCES})
  list(APPEND CRISP_CUDA_OBJECTS $<TARGET_OBJECTS:crisp_cuda_sm90>)
endif()
message(STATUS "CUDA backend: on (CUDA ${CMAKE_CUDA_COMPILER_VERSION}, for ${CRISP_CUDA_ARCHITECTURES} and 90a-real)")
