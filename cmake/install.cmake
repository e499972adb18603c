# What `cmake --install` lays out: headers, both libraries, the command line, and how to find them.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(CRISP_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/crisp)
install(DIRECTORY include/crisp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
# Two export sets: a program that links the shared library must not need the static one's
# dependencies.
install(TARGETS crisp EXPORT crispTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS crisp_static EXPORT crispStaticTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT crispTargets NAMESPACE crisp:: DESTINATION ${CRISP_CMAKE_DIR})
install(EXPORT crispStaticTargets NAMESPACE crisp:: DESTINATION ${CRISP_CMAKE_DIR})
if(TARGET crisp_cli)
  install(TARGETS crisp_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(cmake/crispConfig.cmake.in crispConfig.cmake
  INSTALL_DESTINATION ${CRISP_CMAKE_DIR})
# Before 1.0 every minor release may change the C++ interface.
write_basic_package_version_file(crispConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/crispConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/crispConfigVersion.cmake DESTINATION ${CRISP_CMAKE_DIR})

# Relative to the .pc file, so that an installed tree may be moved.
set(CRISP_PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
set(CRISP_PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX
  BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig
  OUTPUT_VARIABLE CRISP_PC_UP)
set(CRISP_PC_CUDA)
if(CRISP_WITH_CUDA)
  set(CRISP_PC_CUDA " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread")
endif()
configure_file(cmake/crisp.pc.in crisp.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/crisp.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
