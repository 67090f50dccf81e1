# Component `daemon` of the installation: the daemon, its configuration, and the files for systemd.
install(TARGETS pqcached RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT daemon)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/pqcached.sysusers.conf DESTINATION lib/sysusers.d
  RENAME pqcached.conf COMPONENT daemon)
# The unit and the configuration depend on the prefix, which `cmake --install --prefix` may change.
install(CODE "set(source_dir \"${CMAKE_CURRENT_LIST_DIR}\")
set(program \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/pqcached\")
set(unit \"${CMAKE_CURRENT_BINARY_DIR}/pqcached.service\")" COMPONENT daemon)
install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/install_unit.cmake COMPONENT daemon)
