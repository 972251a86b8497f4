//! What this machine has for running programs on GPUs: driver, devices, libraries.
//!
//! Every library is looked for as the runtime does, by the dynamic loader; none is needed to ask.

use cudarc::{cublaslt, cudnn, driver, nccl, nvrtc};

/// Something looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What: `CUDA driver`, `NCCL`.
    pub name: &'static str,
    /// What was found, or why not.
    pub found: Result<String, String>,
    /// How to get it.
    pub fix: &'static str,
}

/// How to get the driver.
pub(crate) const DRIVER: &str = "install NVIDIA's driver, and give the container access to it";
/// How to get NVRTC.
pub(crate) const NVRTC: &str =
    "install CUDA's nvrtc library (cuda-nvrtc, or pip install nvidia-cuda-nvrtc) and put it on LD_LIBRARY_PATH";
/// How to get cuBLASLt.
pub(crate) const CUBLASLT: &str =
    "install CUDA's cuBLAS library (libcublas, or pip install nvidia-cublas) and put it on LD_LIBRARY_PATH";
/// How to get the headers that NVRTC reads.
pub(crate) const HEADERS: &str = "install CUDA's headers (cuda-cudart-dev, or pip install nvidia-cuda-runtime \
                                  nvidia-cuda-crt) and set CUDA_PATH to the folder that holds `include`";
/// How to get NCCL.
pub(crate) const NCCL: &str = "install NCCL (libnccl-dev; of pip's nvidia-nccl package, link libnccl.so to its \
                               libnccl.so.2) and put it on LD_LIBRARY_PATH";

/// The version of CUDA that a driver must know, as it tells it: events are timed by a function that there is from 12.8
/// on, unless this program was built against an older one.
const LEAST_DRIVER: i32 = if driver::sys::CUDA_VERSION < 12_080 { 0 } else { 12_080 };

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Its memory in bytes.
    pub memory: u64,
}

/// The CUDA driver and the libraries that the CUDA backend loads, in the order in which it does.
pub fn libraries() -> Vec<Finding> {
    vec![
        library("CUDA driver", DRIVER, driver_version),
        library("NVRTC", NVRTC, nvrtc_version),
        library("cuBLASLt", CUBLASLT, cublaslt_version),
        library("CUDA headers", HEADERS, headers),
        library("NCCL", NCCL, nccl_version),
        library("cuDNN", "install cuDNN 9 (libcudnn9-cuda-13, or pip install nvidia-cudnn-cu13)", cudnn_version),
    ]
}

/// The GPUs this process may use; none where there is no driver.
pub fn gpus() -> Result<Vec<Gpu>, String> {
    driver_version()?;
    let count = driver::result::device::get_count().map_err(|error| error.to_string())?;
    (0..count).map(|ordinal| gpu(ordinal).map_err(|error| error.to_string())).collect()
}

/// The library is absent, and a version cannot be asked for.
const ABSENT: &str = "the loader does not find it";

fn library(name: &'static str, fix: &'static str, version: fn() -> Result<String, String>) -> Finding {
    Finding { name, found: version(), fix }
}

#[expect(unsafe_code, reason = "asks a C library")]
fn gpu(ordinal: i32) -> Result<Gpu, driver::DriverError> {
    let device = driver::result::device::get(ordinal)?;
    let name = driver::result::device::get_name(device)?;
    // SAFETY: `device` was just given by the driver.
    let memory = unsafe { driver::result::device::total_mem(device)? } as u64;
    Ok(Gpu { name, memory })
}

#[expect(unsafe_code, reason = "asks a C library")]
pub(crate) fn driver_version() -> Result<String, String> {
    // SAFETY: looking for the library runs only its initialisers.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(ABSENT.into());
    }
    driver::result::init().map_err(|error| format!("it does not start: {error}"))?;
    let mut version = 0;
    // SAFETY: the pointer is valid for one integer.
    match unsafe { driver::sys::cuDriverGetVersion(&mut version) } {
        driver::sys::CUresult::CUDA_SUCCESS if version < LEAST_DRIVER => Err(format!(
            "it knows {}, and {} or later is needed: install a newer driver",
            cuda_version(version),
            cuda_version(LEAST_DRIVER)
        )),
        driver::sys::CUresult::CUDA_SUCCESS => Ok(cuda_version(version)),
        error => Err(format!("it gives no version: {error:?}")),
    }
}

#[expect(unsafe_code, reason = "asks a C library")]
fn nvrtc_version() -> Result<String, String> {
    // SAFETY: looking for the library runs only its initialisers; the pointers are valid.
    unsafe {
        if !nvrtc::sys::is_culib_present() {
            return Err(ABSENT.into());
        }
        let (mut major, mut minor) = (0, 0);
        nvrtc::sys::nvrtcVersion(&mut major, &mut minor);
        Ok(format!("{major}.{minor}"))
    }
}

#[expect(unsafe_code, reason = "asks a C library")]
fn cublaslt_version() -> Result<String, String> {
    // SAFETY: looking for the library runs only its initialisers; the call has no argument.
    unsafe {
        if !cublaslt::sys::is_culib_present() {
            return Err(ABSENT.into());
        }
        Ok(dotted(cublaslt::sys::cublasLtGetVersion() as u64))
    }
}

#[expect(unsafe_code, reason = "asks a C library")]
fn nccl_version() -> Result<String, String> {
    // SAFETY: looking for the library runs only its initialisers.
    if !unsafe { nccl::sys::is_culib_present() } {
        return Err(ABSENT.into());
    }
    match nccl::result::get_nccl_version() {
        Ok(version) => Ok(dotted(u64::try_from(version).unwrap_or_default())),
        Err(error) => Err(format!("it gives no version: {error:?}")),
    }
}

#[expect(unsafe_code, reason = "asks a C library")]
fn cudnn_version() -> Result<String, String> {
    // SAFETY: looking for the library runs only its initialisers.
    if !unsafe { cudnn::sys::is_culib_present() } {
        return Err(ABSENT.into());
    }
    Ok(dotted(cudnn::result::get_version() as u64))
}

/// `12080` as `CUDA 12.8`.
fn cuda_version(version: i32) -> String {
    format!("CUDA {}.{}", version / 1000, version % 1000 / 10)
}

/// Where the headers lie that NVRTC reads.
pub(crate) fn headers() -> Result<String, String> {
    let path = crate::cuda::include_path();
    let named = path.display();
    if path.join("cuda_runtime.h").exists() {
        Ok(named.to_string())
    } else {
        Err(format!("no cuda_runtime.h in {named}"))
    }
}

/// `22809` as `2.28.9`, `91900` as `9.19.0`.
fn dotted(version: u64) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}
