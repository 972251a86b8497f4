//! A step as a CUDA graph: recorded once, then launched whole, so that the host has next to nothing to
//! do in a step and the device does not wait for it between kernels.
//!
//! Recording is the driver's stream capture: what is enqueued on the origin stream, and on streams that
//! wait for it and that it waits for in the end, becomes a graph instead of being run. Addresses and
//! scalars are part of the graph; what changes between steps lies in memory that it reads.

#![allow(unsafe_code)]

use super::device::Failure;
use cudarc::driver::{result, sys};

/// A recorded step, ready to be launched.
pub struct Graph(sys::CUgraphExec);

/// Starts recording on a stream. Other threads go on as they like.
pub fn begin(origin: sys::CUstream) -> Result<(), Failure> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream is valid while its device lives.
    unsafe { result::stream::begin_capture(origin, mode) }.map_err(|error| format!("recording: {error:?}"))
}

/// Ends recording; to be called after every [`begin`], whatever went wrong in between.
pub fn end(origin: sys::CUstream) -> Result<Graph, Failure> {
    // Kernels keep the priorities of the streams from which they were recorded.
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    // SAFETY: the stream is valid; the graph was just made and is destroyed once, after its last use.
    unsafe {
        let graph = result::stream::end_capture(origin).map_err(|error| format!("recording: {error:?}"))?;
        if graph.is_null() {
            return Err("recording: something enqueued cannot be part of a graph".to_string());
        }
        let made = result::graph::instantiate(graph, flags).map_err(|error| format!("instantiation: {error:?}"));
        let _ = result::graph::destroy(graph);
        made.map(Graph)
    }
}

impl Graph {
    /// Brings the graph to the device, which its first launch would do.
    pub fn upload(&self, stream: sys::CUstream) -> Result<(), Failure> {
        // SAFETY: graph and stream are valid while the device lives.
        unsafe { result::graph::upload(self.0, stream) }.map_err(|error| format!("upload of a graph: {error:?}"))
    }

    /// Enqueues the whole graph.
    pub fn launch(&self, stream: sys::CUstream) -> Result<(), Failure> {
        // SAFETY: graph and stream are valid while the device lives.
        unsafe { result::graph::launch(self.0, stream) }.map_err(|error| format!("launch of a graph: {error:?}"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `end` and destroyed once. An error cannot be helped.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
