//! Matrix products by cuBLASLt.
//!
//! Operands in bf16 or f16 are multiplied exactly and summed in f32; f32 operands are multiplied in
//! f32, never in TF32, so that plans can be compared. The algorithm is the library's own first choice
//! for the shapes, made when the program is loaded.

#![allow(unsafe_code)]

use super::device::Failure;
use super::kernel::Arg;
use super::select::{Gemm, Matrix};
use cudarc::cublaslt::{result, sys};
use shardc_ir::DType;
use std::ffi::c_void;

/// The library, for one thread and device.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
}

/// A product whose algorithm is chosen and whose addresses are known.
pub struct ReadyGemm {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    /// Of the operands, the result, and what is added to it.
    addresses: [u64; 4],
    /// Its address and bytes.
    workspace: (u64, u64),
    beta: f32,
}

fn says(what: &'static str) -> impl Fn(result::CublasError) -> Failure {
    move |error| format!("cuBLASLt, {what}: {:?}", error.0)
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType, Failure> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::Bf16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        other => Err(format!("no matrix product of {other}")),
    }
}

/// A row-major `[rows, columns]` matrix as cuBLASLt's column-major one: its transpose.
struct Seen {
    rows: u64,
    columns: u64,
    leading: u64,
    transposed: bool,
}

/// How `matrix`, `[rows, columns]`, looks where its transpose is wanted.
fn seen(matrix: &Matrix, rows: u64, columns: u64) -> Seen {
    if matrix.column == 1 {
        Seen { rows: columns, columns: rows, leading: matrix.row.max(columns), transposed: false }
    } else {
        Seen { rows, columns, leading: matrix.column.max(rows), transposed: true }
    }
}

impl Blas {
    /// Opens the library for this thread's device.
    pub fn new() -> Result<Self, Failure> {
        Ok(Self { handle: result::create_handle().map_err(says("open"))? })
    }

    /// Chooses an algorithm. `resolve` gives addresses; `workspace` is an address and bytes that nothing
    /// else uses while the product runs.
    pub fn prepare(
        &self,
        gemm: &Gemm,
        workspace: (u64, u64),
        resolve: impl Fn(Arg) -> u64,
    ) -> Result<ReadyGemm, Failure> {
        // The library writes column-major: the transposed product is asked for, with the operands
        // swapped. Where the result is column-major already, it is the plain one.
        let flip = |matrix: Matrix| Matrix { row: matrix.column, column: matrix.row, ..matrix };
        let swap = gemm.c.column != 1;
        let (first, second, target, rows, columns) = match swap {
            false => (gemm.b, gemm.a, gemm.c, gemm.n, gemm.m),
            true => (flip(gemm.a), flip(gemm.b), flip(gemm.c), gemm.m, gemm.n),
        };
        let a = seen(&first, gemm.k, rows);
        let b = seen(&second, columns, gemm.k);
        let c = Seen { rows, columns, leading: target.row.max(rows), transposed: false };
        let layout = |seen: &Seen, matrix: &Matrix| {
            let leading = seen.leading as i64;
            let layout = result::create_matrix_layout(data_type(matrix.dtype)?, seen.rows, seen.columns, leading)
                .map_err(says("layout"))?;
            use sys::cublasLtMatrixLayoutAttribute_t as L;
            let (count, stride) = (gemm.batch as i32, matrix.batch as i64);
            set_layout(layout, L::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
            set_layout(layout, L::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride)?;
            Ok::<_, Failure>(layout)
        };
        let layouts = [layout(&a, &first)?, layout(&b, &second)?, layout(&c, &target)?];
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description =
            result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map_err(says("description"))?;
        use sys::cublasLtMatmulDescAttributes_t as D;
        for (attribute, seen) in [(D::CUBLASLT_MATMUL_DESC_TRANSA, &a), (D::CUBLASLT_MATMUL_DESC_TRANSB, &b)] {
            // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
            describe(description, attribute, &i32::from(seen.transposed))?;
        }
        if let Some(bias) = gemm.bias {
            // One element per row of the library's result, which is a column of ours; of its type.
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as i32;
            describe(description, D::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            describe(description, D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &resolve(bias))?;
        }
        let addend = gemm.addend.map_or(resolve(target.at), &resolve);
        let addresses = [resolve(first.at), resolve(second.at), resolve(target.at), addend];
        let algorithm = self.choose(description, layouts, addresses, workspace.1).map_err(|error| {
            format!("{error} ({} x {} x {}, {} products of {})", gemm.m, gemm.n, gemm.k, gemm.batch, gemm.a.dtype)
        })?;
        let beta = if gemm.addend.is_some() { 1.0 } else { 0.0 };
        Ok(ReadyGemm { description, layouts, algorithm, addresses, workspace, beta })
    }

    fn choose(
        &self,
        description: sys::cublasLtMatmulDesc_t,
        [a, b, c]: [sys::cublasLtMatrixLayout_t; 3],
        [a_at, b_at, d_at, c_at]: [u64; 4],
        workspace: u64,
    ) -> Result<sys::cublasLtMatmulAlgo_t, Failure> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        let preference = result::create_matmul_pref().map_err(says("preference"))?;
        let set = |attribute, bytes: *const c_void, size| {
            // SAFETY: the preference is valid and the attribute has this size.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, bytes, size) }.map_err(says("preference"))
        };
        let workspace = workspace as usize;
        set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::ptr::from_ref(&workspace).cast(), 8)?;
        let alignments = [
            P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        for (attribute, address) in alignments.into_iter().zip([a_at, b_at, c_at, d_at]) {
            let alignment = 1u32 << address.trailing_zeros().min(8);
            set(attribute, std::ptr::from_ref(&alignment).cast(), 4)?;
        }
        // SAFETY: all handles are valid; the preference is destroyed once.
        unsafe {
            let found = result::get_matmul_algo_heuristic(self.handle, description, a, b, c, c, preference);
            result::destroy_matmul_pref(preference).map_err(says("preference"))?;
            Ok(found.map_err(says("no algorithm"))?.algo)
        }
    }

    /// Enqueues a product.
    pub fn launch(&self, ready: &ReadyGemm, stream: cudarc::driver::sys::CUstream) -> Result<(), Failure> {
        let [a, b, d, c] = ready.addresses;
        let alpha = 1.0f32;
        let [la, lb, lc] = ready.layouts;
        // SAFETY: layouts and algorithm were made for these addresses, which live as long as the
        // device; the factors are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                ready.description,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&ready.beta).cast(),
                a as *const c_void,
                la,
                b as *const c_void,
                lb,
                c as *const c_void,
                lc,
                d as *mut c_void,
                lc,
                &ready.algorithm,
                ready.workspace.0 as *mut c_void,
                ready.workspace.1 as usize,
                stream.cast(),
            )
        }
        .map_err(says("product"))
    }
}

fn describe<T>(
    description: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), Failure> {
    let bytes = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: the description is valid and the attribute has the size of `T`.
    unsafe { result::set_matmul_desc_attribute(description, attribute, bytes, size_of::<T>()) }
        .map_err(says("description"))
}

fn set_layout<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: sys::cublasLtMatrixLayoutAttribute_t,
    value: &T,
) -> Result<(), Failure> {
    let bytes = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: the layout is valid and the attribute has the size of `T`.
    unsafe { result::set_matrix_layout_attribute(layout, attribute, bytes, size_of::<T>()) }.map_err(says("layout"))
}
