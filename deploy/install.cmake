# Component `daemon` of the installation: the daemon, its configuration, the files for systemd, and what plug-ins need.
install(TARGETS pqcached RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT daemon)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/pqcached.sysusers.conf DESTINATION lib/sysusers.d
  RENAME pqcached.conf COMPONENT daemon)
# The interface of plug-ins, and their example.
install(FILES ${PROJECT_SOURCE_DIR}/kvstore/plugins/include/pqcached/index_plugin.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/pqcached COMPONENT daemon)
install(FILES ${PROJECT_SOURCE_DIR}/kvstore/plugins/example/sq.cc
  DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/pqcached/plugin COMPONENT daemon)
# The unit and the configuration depend on the prefix, which `cmake --install --prefix` may change.
install(CODE "set(source_dir \"${CMAKE_CURRENT_LIST_DIR}\")
set(program \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/pqcached\")
set(unit \"${CMAKE_CURRENT_BINARY_DIR}/pqcached.service\")" COMPONENT daemon)
install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/install_unit.cmake COMPONENT daemon)
