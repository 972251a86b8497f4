//! How an algorithm is configured.
//!
//! cuBLASLt proposes few algorithms for a product, each a kind with a configuration: the tile of the result
//! that a block makes, the blocks that share what they load, the order of tiles. Where the product also adds
//! a bias or a residual, what it proposes for the plain product may be missing though it works and is faster.
//! So what is proposed for one product of a program is offered to the others as well.

#![allow(unsafe_code)]

use super::{Algorithm, Blas, Problem, alignment};
use cudarc::cublaslt::sys;
use std::collections::BTreeSet;
use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;

/// Bytes of the widest vector that kernels load.
const VECTOR: u32 = 16;

/// What an algorithm is set to, by the library's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Configuration {
    /// Which kind of algorithm; it is not set but had.
    kind: u32,
    tile: u32,
    stages: u32,
    splits: u32,
    reduction: u32,
    inner: u16,
    cluster: u16,
    swizzle: u32,
    custom: u32,
}

impl Configuration {
    /// What an algorithm is set to.
    pub fn of(algorithm: &Algorithm) -> Self {
        let word = |attribute| u32::from_ne_bytes(get(algorithm, attribute));
        let half = |attribute| u16::from_ne_bytes(get(algorithm, attribute));
        Self {
            kind: word(Attribute::CUBLASLT_ALGO_CONFIG_ID),
            tile: word(Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID),
            stages: word(Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID),
            splits: word(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
            reduction: word(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
            inner: half(Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
            cluster: half(Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
            swizzle: word(Attribute::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
            custom: word(Attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
        }
    }

    /// An algorithm of the same kind, set to this.
    fn set(&self, base: &Algorithm) -> Option<Algorithm> {
        let mut algorithm = sys::cublasLtMatmulAlgo_t { data: *base };
        let mut put = |attribute, bytes: &[u8]| {
            // SAFETY: the algorithm and the bytes are valid, and the attribute has this size.
            unsafe {
                sys::cublasLtMatmulAlgoConfigSetAttribute(&mut algorithm, attribute, bytes.as_ptr().cast(), bytes.len())
            }
            .result()
            .ok()
        };
        put(Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID, &self.tile.to_ne_bytes())?;
        put(Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID, &self.stages.to_ne_bytes())?;
        put(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &self.splits.to_ne_bytes())?;
        put(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &self.reduction.to_ne_bytes())?;
        put(Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, &self.inner.to_ne_bytes())?;
        put(Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &self.cluster.to_ne_bytes())?;
        put(Attribute::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, &self.swizzle.to_ne_bytes())?;
        put(Attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &self.custom.to_ne_bytes())?;
        Some(algorithm.data)
    }

    /// This with its sums split into so many parts.
    pub fn split(self, parts: impl IntoIterator<Item = u32>) -> impl Iterator<Item = Self> {
        parts.into_iter().map(move |splits| Self { splits, reduction: REDUCTION, ..self })
    }

    /// This with the order of tiles and the sharing of blocks of each of a set.
    pub fn reordered(&self, known: &BTreeSet<Self>) -> BTreeSet<Self> {
        let of_kind = || known.iter().filter(|other| other.kind == self.kind);
        let orders: BTreeSet<(u32, u32)> = of_kind().map(|other| (other.swizzle, other.custom)).collect();
        let clusters: BTreeSet<u16> = of_kind().map(|other| other.cluster).collect();
        let one = |(swizzle, custom): (u32, u32)| {
            clusters.iter().map(move |cluster| Self { cluster: *cluster, swizzle, custom, ..*self })
        };
        orders.into_iter().flat_map(one).collect()
    }
}

/// How the partial results of a sum that is split are added: in the type of the sum, in a fixed order.
pub(super) const REDUCTION: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// The bytes of an attribute; zeros where the library does not say.
fn get<const BYTES: usize>(algorithm: &Algorithm, attribute: Attribute) -> [u8; BYTES] {
    let (algorithm, mut bytes, mut written) = (sys::cublasLtMatmulAlgo_t { data: *algorithm }, [0; BYTES], 0);
    // SAFETY: the algorithm is valid and there is room for the attribute.
    let said = unsafe {
        let out = bytes.as_mut_ptr().cast();
        sys::cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, out, BYTES, &mut written)
    };
    if said.result().is_ok() { bytes } else { [0; BYTES] }
}

impl Blas {
    /// The algorithms for a problem that are set to one of some configurations, by the kinds that were proposed
    /// for it; those that do not fit it are left out. None for matrices that do not begin at whole vectors: the library's
    /// check asks for no addresses, and its proposals alone heed them.
    pub fn configured<'a>(
        &self,
        problem: &Problem,
        proposed: &[Algorithm],
        configurations: impl IntoIterator<Item = &'a Configuration>,
    ) -> Vec<(Configuration, Algorithm)> {
        if problem.addresses.iter().any(|address| alignment(*address) < VECTOR) {
            return Vec::new();
        }
        let bases: Vec<(u32, &Algorithm)> =
            proposed.iter().map(|algorithm| (Configuration::of(algorithm).kind, algorithm)).collect();
        let one = |configuration: &Configuration| {
            let (_, base) = bases.iter().find(|(kind, _)| *kind == configuration.kind)?;
            let algorithm = configuration.set(base)?;
            self.fits(problem, &algorithm).then_some((*configuration, algorithm))
        };
        configurations.into_iter().filter_map(one).collect()
    }
}
