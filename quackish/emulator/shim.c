/* What host code compiled by CuTe DSL calls of CUDA. A launch calls back into Python; the rest is answered from a table.
 *
 * Each kernel's library is linked with its own copy, so nothing here is shared between kernels. Host code that calls
 * any other function does not load: see host.py. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 801 };                /* cudaError_t, CUresult */
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

static OnLaunch on_launch;
static DeviceAttribute device_attributes[64];
static unsigned num_device_attributes;

/* Python calls this once, before the first call of the kernel. Returns 0, or -1 if there are too many attributes. */
int emulator_connect(OnLaunch launch, const DeviceAttribute *attributes, unsigned count) {
  if (count > sizeof device_attributes / sizeof *device_attributes) return -1;
  for (unsigned i = 0; i < count; i++) device_attributes[i] = attributes[i];
  num_device_attributes = count;
  on_launch = launch;
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

void cuda_dialect_unload_library_once(int64_t *state) {}
const char *cuda_dialect_get_error_name(int error) { return "an error of the emulated CUDA"; }

void CuteDSLRT_TVMFFISetRaisedCudaError(void (*set_error)(const char *kind, const char **parts, int count), int error) {
  char digits[12], *digit = digits + sizeof digits - 1;
  *digit = 0;
  for (unsigned rest = error; digit == digits + sizeof digits - 1 || rest; rest /= 10) *--digit = '0' + rest % 10;
  const char *parts[] = {"the emulated CUDA answered with error ", digit};
  set_error("RuntimeError", parts, 2);
}
