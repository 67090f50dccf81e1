/* client.h is C: it compiles as C99 without warnings, and PQC_INIT sets the size. */
#include "pqcached/client.h"

int main(void) {
  pqc_selection selection = PQC_INIT(pqc_selection);
  pqc_tensor tensor = PQC_INIT(pqc_tensor);
  if (selection.struct_size != sizeof(pqc_selection) || selection.excluded || tensor.ptr) return 1;
  return pqc_abi_version() == PQC_ABI_VERSION ? 0 : 1;
}
