/* Preloaded into a process that runs a GPU program: its memory is aligned as a GPU's, which torch's CPU memory is not. */

#include <errno.h>
#include <malloc.h>

enum { ALIGNMENT = 256 };

int posix_memalign(void **address, size_t alignment, size_t size) {
  *address = memalign(alignment < ALIGNMENT ? ALIGNMENT : alignment, size);
  return *address || !size ? 0 : ENOMEM;
}
