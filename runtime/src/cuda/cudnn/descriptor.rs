//! Descriptors of cuDNN's backend interface: objects that are made, given attributes, and finalised.
//!
//! An attribute is an array of values of one type, and the library is told a count and an untyped
//! pointer. [`Value`] ties each Rust type to its tag, so that nothing but its implementations can be
//! wrong about sizes.

#![allow(unsafe_code)]

use crate::cuda::device::{Failure, text};
use cudarc::cudnn::sys;
use std::ffi::c_void;

pub use sys::cudnnBackendAttributeName_t as Name;
pub use sys::cudnnBackendDescriptorType_t as Kind;

use sys::cudnnBackendAttributeType_t as Tag;

/// A value of an attribute.
///
/// # Safety
/// The library must read and write arrays of `Self` where it is told [`Value::TAG`].
pub unsafe trait Value: Copy {
    /// The library's name of the type.
    const TAG: Tag;
}

/// An address, on the device or the host.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Address(pub u64);

/// What the library notes of an engine's arithmetic: a number of `cudnnBackendNumericalNote_t`, which later versions
/// lengthen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Note(pub u32);

/// What a knob of an engine sets: a number of `cudnnBackendKnobType_t`, which later versions lengthen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Knob(pub u32);

/// Another descriptor.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Raw(sys::cudnnBackendDescriptor_t);

// SAFETY: each has the size and the meaning that the tag stands for; the library runs on 64-bit
// machines only, so an address has eight bytes.
unsafe impl Value for i64 {
    const TAG: Tag = Tag::CUDNN_TYPE_INT64;
}
// SAFETY: as above.
unsafe impl Value for f32 {
    const TAG: Tag = Tag::CUDNN_TYPE_FLOAT;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnConvolutionMode_t {
    const TAG: Tag = Tag::CUDNN_TYPE_CONVOLUTION_MODE;
}
// SAFETY: as above; any number is one.
unsafe impl Value for Note {
    const TAG: Tag = Tag::CUDNN_TYPE_NUMERICAL_NOTE;
}
// SAFETY: as above; any number is one.
unsafe impl Value for Knob {
    const TAG: Tag = Tag::CUDNN_TYPE_KNOB_TYPE;
}
// SAFETY: as above.
unsafe impl Value for bool {
    const TAG: Tag = Tag::CUDNN_TYPE_BOOLEAN;
}
// SAFETY: as above.
unsafe impl Value for Address {
    const TAG: Tag = Tag::CUDNN_TYPE_VOID_PTR;
}
// SAFETY: as above.
unsafe impl Value for Raw {
    const TAG: Tag = Tag::CUDNN_TYPE_BACKEND_DESCRIPTOR;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnHandle_t {
    const TAG: Tag = Tag::CUDNN_TYPE_HANDLE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnDataType_t {
    const TAG: Tag = Tag::CUDNN_TYPE_DATA_TYPE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnPointwiseMode_t {
    const TAG: Tag = Tag::CUDNN_TYPE_POINTWISE_MODE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnReduceTensorOp_t {
    const TAG: Tag = Tag::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
}
// SAFETY: as above.
unsafe impl Value for sys::cudnnBackendHeurMode_t {
    const TAG: Tag = Tag::CUDNN_TYPE_HEUR_MODE;
}

/// A descriptor, destroyed when dropped.
pub struct Descriptor(Raw);

/// What a status means, with the library's own words.
pub fn check(status: sys::cudnnStatus_t, what: impl std::fmt::Debug) -> Result<(), Failure> {
    if status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut words = [0; 1024];
    // SAFETY: the library writes a string that ends in a zero byte into as many bytes as it is told.
    unsafe { sys::cudnnGetLastErrorString(words.as_mut_ptr(), words.len()) };
    Err(format!("cuDNN, {what:?}: {status:?} {}", text(words.as_ptr())))
}

impl Descriptor {
    /// One without attributes.
    pub fn new(kind: Kind) -> Result<Self, Failure> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library writes a descriptor, which `drop` destroys.
        check(unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut raw) }, kind)?;
        Ok(Self(Raw(raw)))
    }

    /// Sets an attribute.
    pub fn with<V: Value>(self, name: Name, values: &[V]) -> Result<Self, Failure> {
        let at = values.as_ptr().cast::<c_void>();
        // SAFETY: the library reads this many values of the type that the tag says.
        let status = unsafe { sys::cudnnBackendSetAttribute(self.raw(), name, V::TAG, values.len() as i64, at) };
        check(status, name)?;
        Ok(self)
    }

    /// Sets an attribute to other descriptors.
    pub fn with_parts(self, name: Name, parts: &[&Self]) -> Result<Self, Failure> {
        let parts: Vec<Raw> = parts.iter().map(|part| part.0).collect();
        self.with(name, &parts)
    }

    /// Ends the making: the library checks the attributes.
    pub fn finalize(self) -> Result<Self, Failure> {
        // SAFETY: the descriptor is valid.
        check(unsafe { sys::cudnnBackendFinalize(self.raw()) }, "finalize")?;
        Ok(self)
    }

    /// Reads at most `into.len()` values of an attribute; how many there were to write.
    fn read<V: Value>(&self, name: Name, into: &mut [V]) -> Result<usize, Failure> {
        let mut count = 0;
        let (room, at) = (into.len() as i64, into.as_mut_ptr().cast::<c_void>());
        // SAFETY: the library writes at most as many values as there is room for.
        let status = unsafe { sys::cudnnBackendGetAttribute(self.raw(), name, V::TAG, room, &mut count, at) };
        check(status, name)?;
        Ok(count.max(0) as usize)
    }

    /// An attribute that is one number.
    pub fn number(&self, name: Name) -> Result<i64, Failure> {
        let mut value = [0i64];
        self.read(name, &mut value)?;
        Ok(value[0])
    }

    /// What a choice of a knob is of.
    pub fn knob(&self) -> Result<Knob, Failure> {
        let mut knob = [Knob(u32::MAX)];
        self.read(Name::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, &mut knob)?;
        Ok(knob[0])
    }

    /// The notes on an engine's arithmetic.
    pub fn notes(&self) -> Result<Vec<Note>, Failure> {
        let mut notes = [Note(u32::MAX); 16];
        let count = self.read(Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, &mut notes)?;
        Ok(notes[..count.min(notes.len())].to_vec())
    }

    /// An attribute that is at most `most` descriptors of one kind.
    pub fn parts(&self, name: Name, kind: Kind, most: usize) -> Result<Vec<Self>, Failure> {
        let mut parts = (0..most).map(|_| Self::new(kind)).collect::<Result<Vec<_>, _>>()?;
        // The library fills descriptors that the caller has made.
        let mut raws: Vec<Raw> = parts.iter().map(|part| part.0).collect();
        let count = self.read(name, &mut raws)?;
        parts.truncate(count);
        Ok(parts)
    }

    /// What the library's functions take.
    pub fn raw(&self) -> sys::cudnnBackendDescriptor_t {
        self.0.0
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor was made by `new` and is destroyed once. An error cannot be helped.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.raw()) };
    }
}
