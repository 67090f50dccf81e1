# Runs at installation: install.cmake sets source_dir, program and unit.
#
# The configuration of /usr is in /etc, that of another prefix below the prefix (as GNUInstallDirs has it).
set(configuration_dir ${CMAKE_INSTALL_PREFIX}/etc)
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr")
  set(configuration_dir /etc)
endif()
set(configuration ${configuration_dir}/pqcached.yaml)
configure_file(${source_dir}/pqcached.service.in ${unit} @ONLY)
file(INSTALL ${unit} DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/systemd/system)
# An operator's changes outlive an update.
if(NOT EXISTS $ENV{DESTDIR}${configuration})
  file(INSTALL ${source_dir}/pqcached.yaml DESTINATION ${configuration_dir})
endif()
