// Keys of the configuration for eviction, quotas and other behaviour when memory is short
// (config.h).
#ifndef PQCACHED_SERVICE_CONFIG_CONFIG_PRESSURE_H_
#define PQCACHED_SERVICE_CONFIG_CONFIG_PRESSURE_H_

#include <vector>

#include "service/config/config.h"

namespace pqcached::service {

void AddPressureKeys(std::vector<ConfigKey>& keys);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_CONFIG_CONFIG_PRESSURE_H_
