# Component `client` of the installation: the libraries for engines, the tool for operators, and the one that
# checks engines.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/pqcached)
set_target_properties(pqcached_client PROPERTIES EXPORT_NAME client)
file(RELATIVE_PATH lib_from_bin /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
set_target_properties(pqcachectl pqcached-conform PROPERTIES INSTALL_RPATH "$ORIGIN/${lib_from_bin}")

install(TARGETS pqcached_client EXPORT pqcachedTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client NAMELINK_COMPONENT client)
install(TARGETS pqcached_rpc LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client)
if(TARGET pqcached_gpu_module)
  install(TARGETS pqcached_gpu_module LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client)
endif()
# llama.cpp is given its path (GGML_BACKEND_PATH): it is no library to link.
file(RELATIVE_PATH lib_from_plugins /${CMAKE_INSTALL_LIBDIR}/pqcached /${CMAKE_INSTALL_LIBDIR})
set_target_properties(ggml_pqcached PROPERTIES INSTALL_RPATH "$ORIGIN/${lib_from_plugins}")
install(TARGETS ggml_pqcached LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/pqcached COMPONENT client)
set_target_properties(pqcached_llama PROPERTIES EXPORT_NAME llama INSTALL_RPATH "$ORIGIN")
install(TARGETS pqcached_llama EXPORT pqcachedTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client NAMELINK_COMPONENT client)
install(FILES engines/llama/application/pqcached_llama.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT client)
install(TARGETS pqcachectl pqcached-conform RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT client)
install(FILES include/pqcached/attach.h include/pqcached/client.h include/pqcached/status.h include/pqcached/tensor.h include/pqcached/index.h include/pqcached/names.h include/pqcached/cache_events.h include/pqcached/operation.h include/pqcached/load.h
  include/pqcached/query.h include/pqcached/decode.h include/pqcached/step.h include/pqcached/page_cache.h include/pqcached/page_cache.hpp include/pqcached/pages.h include/pqcached/positions.h include/pqcached/threads.h include/pqcached/model.h include/pqcached/progress.h include/pqcached/rows.h
  include/pqcached/gpu.h include/pqcached/cache_events.hpp include/pqcached/operation.hpp include/pqcached/client.hpp include/pqcached/sequence.hpp
  include/pqcached/step.hpp include/pqcached/values.hpp include/pqcached/gpu.hpp
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/pqcached COMPONENT client)
install(EXPORT pqcachedTargets NAMESPACE pqcached:: DESTINATION ${package_dir} COMPONENT client)

configure_package_config_file(cmake/pqcachedConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/pqcachedConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/pqcachedConfigVersion.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/pqcachedConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/pqcachedConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT client)
