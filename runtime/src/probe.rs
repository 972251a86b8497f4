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
        library("CUDA driver", "install NVIDIA's driver, and give the container access to it", driver_version),
        library("NVRTC", "install CUDA's nvrtc library (cuda-nvrtc, or pip install nvidia-cuda-nvrtc)", nvrtc_version),
        library(
            "cuBLASLt",
            "install CUDA's cuBLAS library (libcublas, or pip install nvidia-cublas)",
            cublaslt_version,
        ),
        library("NCCL", "install NCCL (libnccl2, or pip install nvidia-nccl-cu13)", nccl_version),
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
fn driver_version() -> Result<String, String> {
    // SAFETY: looking for the library runs only its initialisers.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(ABSENT.into());
    }
    driver::result::init().map_err(|error| format!("it does not start: {error}"))?;
    let mut version = 0;
    // SAFETY: the pointer is valid for one integer.
    match unsafe { driver::sys::cuDriverGetVersion(&mut version) } {
        driver::sys::CUresult::CUDA_SUCCESS => Ok(format!("CUDA {}.{}", version / 1000, version % 1000 / 10)),
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

/// `22809` as `2.28.9`, `91900` as `9.19.0`.
fn dotted(version: u64) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}
