/* What host code compiled by CuTe DSL calls of CUDA. A launch calls back into Python; the rest is answered from a table.
 *
 * Each kernel's library is linked with its own copy, so nothing here is shared between kernels. Host code that calls
 * any other function does not load: see host.py. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_SUPPORTED = 801 };  /* cudaError_t, CUresult */
enum { STATIC_SHARED_BYTES = 1 };                         /* CUfunction_attribute */

typedef struct {                                          /* cudaLaunchConfig_t */
  unsigned grid[3], block[3];
  size_t dynamic_shared_bytes;
  void *stream;
  void *attributes;
  unsigned num_attributes;
} Config;

typedef struct { int id, value; } DeviceAttribute;
typedef int (*OnLaunch)(const Config *config, const char *kernel, void **parameters);
typedef void (*OnError)(int error);

static OnLaunch on_launch;
static OnError on_error;
static DeviceAttribute device_attributes[64];
static unsigned num_device_attributes;

/* Python calls this once, before the first call of the kernel. Returns 0, or -1 if there are too many attributes. */
int emulator_connect(OnLaunch launch, OnError error, const DeviceAttribute *attributes, unsigned count) {
  if (count > sizeof device_attributes / sizeof *device_attributes) return -1;
  for (unsigned i = 0; i < count; i++) device_attributes[i] = attributes[i];
  num_device_attributes = count;
  on_launch = launch;
  on_error = error;
  return 0;
}

/* A kernel's handle is its name. */
int _cudaLaunchKernelEx(const Config *config, void *kernel, void **parameters) {
  return on_launch(config, kernel, parameters);
}

int _cudaLaunchKernel(void *kernel, int grid_x, int grid_y, int grid_z, int block_x, int block_y, int block_z,
                      void **parameters, size_t dynamic_shared_bytes, void *stream) {
  Config config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_shared_bytes, stream, NULL, 0};
  return on_launch(&config, kernel, parameters);
}

int _cudaLibraryLoadData(void **library, const void *data, void *jit_options, void *jit_values, int num_jit,
                         void *library_options, void *library_values, int num_library) {
  *library = (void *)data;
  return SUCCESS;
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  *kernel = strdup(name);  /* the host code's copy is on its stack; this one lives as long as the process */
  return SUCCESS;
}

int _cudaLibraryUnload(void *library) { return SUCCESS; }

int _cudaGetDevice(int *device) {
  *device = 0;
  return SUCCESS;
}

int _cudaGetDeviceCount(int *count) {
  *count = 1;
  return SUCCESS;
}

int _cudaSetDevice(int device) { return SUCCESS; }

int _cudaDeviceGetAttribute(int *value, int id, int device) {
  for (unsigned i = 0; i < num_device_attributes; i++) {
    if (device_attributes[i].id == id) {
      *value = device_attributes[i].value;
      return SUCCESS;
    }
  }
  return NOT_SUPPORTED;
}

/* Host code subtracts this from the device's limit to get the limit of dynamic shared memory. The emulator checks the
 * sum of both at each launch, so 0 does no harm. */
int _cuKernelGetAttribute(int *value, int id, void *kernel, int device) {
  *value = 0;
  return id == STATIC_SHARED_BYTES ? SUCCESS : NOT_SUPPORTED;
}

int _cudaFuncSetAttribute(void *kernel, int id, int value) { return SUCCESS; }
int _cudaKernelSetAttributeForDevice(void *kernel, int id, int value, int device) { return SUCCESS; }

/* A tensor map in the format that tensor_map.py describes. Strides are in bytes, and dimension 0 has none. */
int _cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *sizes,
                            const uint64_t *strides, const unsigned *box, const unsigned *element_strides,
                            int interleave, int swizzle, int promotion, int fill) {
  static const int codes[] = {0, 1, 2, 3, 4, 5, 6, 7, -1, 10, -1, 7};  /* by CUtensorMapDataType */
  if (rank < 1 || rank > 5 || (uintptr_t)address % 16) return INVALID_VALUE;
  if (type < 0 || type >= (int)(sizeof codes / sizeof *codes) || codes[type] < 0) return NOT_SUPPORTED;
  if (interleave || swizzle < 0 || swizzle > 4 || fill) return NOT_SUPPORTED;
  uint32_t half[32] = {0};
  half[0] = (uint32_t)(uintptr_t)address;
  half[1] = (uint64_t)(uintptr_t)address >> 32;
  half[2] = 2 | (rank - 1) << 4 | codes[type] << 7 | (swizzle < 4 ? swizzle : 3 | 1 << 6) << 13 | (type == 11) << 16;
  half[13] = (box[0] - 1) << 24;
  for (unsigned i = 0; i < rank; i++) {
    if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256) return INVALID_VALUE;
    if (element_strides[i] != 1) return NOT_SUPPORTED;
    half[8 + i] = sizes[i] - 1;
    if (i == 0) continue;
    uint64_t stride = strides[i - 1];
    if (stride % 16 || stride >> 40) return INVALID_VALUE;
    half[2 + i] = stride >> 4;
    half[7] |= (uint32_t)(stride >> 36) << 4 * (i - 1);
    half[14] |= (box[i] - 1) << 8 * (i - 1);
  }
  memcpy(map, half, sizeof half);
  return SUCCESS;
}

/* What follows replaces functions of the compiler's runtime library. The real `init_library_once` asks a driver. */
static char init_lock;

/* `state` is a word of the host code, at first 0, that nothing else uses. */
int cuda_dialect_init_library_once(int64_t *state, int (*init)(void **), int (*load_to_device)(void **, int),
                                   void *set_error) {
  int error = SUCCESS;
  while (__atomic_test_and_set(&init_lock, __ATOMIC_ACQUIRE)) continue;
  if (*state == 0) {
    void *libraries[64] = {0};
    error = init(libraries);
    if (error == SUCCESS) error = load_to_device(libraries, 0);
    if (error == SUCCESS) *state = 1;
  }
  __atomic_clear(&init_lock, __ATOMIC_RELEASE);
  return error;
}

/* The real one ends the process. Python raises when the host code returns. */
void cuda_dialect_assert_success(int error) {
  if (error != SUCCESS) on_error(error);
}

void cuda_dialect_unload_library_once(int64_t *state) {}
const char *cuda_dialect_get_error_name(int error) { return "an error of the emulated CUDA"; }

void CuteDSLRT_TVMFFISetRaisedCudaError(void (*set_error)(const char *kind, const char **parts, int count), int error) {
  char digits[12], *digit = digits + sizeof digits - 1;
  *digit = 0;
  for (unsigned rest = error; digit == digits + sizeof digits - 1 || rest; rest /= 10) *--digit = '0' + rest % 10;
  const char *parts[] = {"the emulated CUDA answered with error ", digit};
  set_error("RuntimeError", parts, 2);
}
