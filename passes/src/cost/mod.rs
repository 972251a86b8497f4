//! The cost model: how long operations and collectives take, in seconds. What follows for a step is for the search
//! ([`estimate`](crate::search)) and the simulation of programs ([`simulate`](crate::simulate)) to say.
//!
//! * [`node`]: one operation on one device, by its *local* shapes: a product by tiles, waves and
//!   depth ([`matmul`]), a convolution as the product that it is ([`convolution`]), attention by the generation of its
//!   kernel ([`attention`]), the rest by the bytes it moves;
//! * [`collective`]: a start, hops and bytes over the slowest link of a group;
//! * [`host`]: what lies on the host or its disks, and the host's update;
//! * [`ring`]: attention whose keys and values go round the ranks;
//! * [`overlap`]: what communication costs beside computation.
//!
//! Figures of devices and links come from the cluster's [`Profile`](crate::cluster::Profile), those
//! of the software from its [`Library`]. How far the model is from published measurements of other
//! systems is what `published` of `shardc-bench` prints.

pub mod attention;
pub mod collective;
pub mod convolution;
pub mod host;
pub mod library;
pub mod machine;
pub mod matmul;
pub mod node;
pub mod overlap;
pub mod ring;

pub use library::Library;
pub use machine::Machine;
pub use node::{Bound, Pass, is_product, is_view, model_flops, peak, through_views};
