//! A device with its software.

use super::library::Library;
use crate::cluster::Profile;

/// A device under one generation of software.
#[derive(Clone, Copy, Debug)]
pub struct Machine<'a> {
    /// The device.
    pub device: &'a Profile,
    /// The software.
    pub library: &'a Library,
}

impl<'a> Machine<'a> {
    /// A device under this project's own runtime.
    pub fn own(device: &'a Profile) -> Self {
        Self { device, library: &Library::SHARDC }
    }

    /// Bytes/s that a kernel reaches in device memory.
    pub fn bandwidth(self) -> f64 {
        self.device.memory_bandwidth.value * self.device.memory_efficiency.value
    }

    /// What starting one kernel takes, in seconds.
    pub fn launch(self) -> f64 {
        self.device.launch_seconds.value * self.library.launch
    }
}
