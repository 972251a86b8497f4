//! Memory aligned for any element type: arenas, and tensors outside of one.
//!
//! Besides this, `unsafe` is in the views of the executor and in the posts of the collectives.
#![allow(unsafe_code)]

use shardc_ir::{HostTensor, TensorType};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Arenas and their buffers start at multiples of this.
pub const ALIGNMENT: usize = 256;

/// Gives the start of an empty block its alignment, which views of elements ask for.
#[repr(align(256))]
struct Aligned;

/// A block of bytes, zero at first, that starts at a multiple of [`ALIGNMENT`].
pub struct AlignedBytes {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the block is owned, and reached only through the borrows below.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `length` zeros. Pages that are never touched take no memory.
    pub fn zeros(length: usize) -> Self {
        let Some(layout) = Self::layout(length) else {
            return Self { start: NonNull::<Aligned>::dangling().cast(), length: 0 };
        };
        // SAFETY: the layout has a size greater than zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, length }
    }

    /// The first byte, for the views of an arena.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn layout(length: usize) -> Option<Layout> {
        Layout::from_size_align(length, ALIGNMENT).ok().filter(|layout| layout.size() > 0)
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.length) {
            // SAFETY: allocated in `zeros` with this layout.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

impl std::ops::Deref for AlignedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `length` initialised bytes from `start` are owned by `self`; of an empty block the
        // dangling pointer is valid for zero bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl std::ops::DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

/// A tensor in memory of its own.
pub struct Array {
    /// The type.
    pub ty: TensorType,
    /// `ty.bytes()` bytes.
    pub bytes: AlignedBytes,
}

impl Array {
    /// A tensor of zeros.
    pub fn zeros(ty: TensorType) -> Self {
        let bytes = AlignedBytes::zeros(ty.bytes().0 as usize);
        Self { ty, bytes }
    }

    /// A copy.
    pub fn to_host(&self) -> HostTensor {
        HostTensor { ty: self.ty.clone(), bytes: self.bytes.to_vec() }
    }

    /// A copy of bytes of this type.
    pub fn copy_of(ty: TensorType, bytes: &[u8]) -> Self {
        let mut array = Self::zeros(ty);
        array.bytes.copy_from_slice(bytes);
        array
    }
}
