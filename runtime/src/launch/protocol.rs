//! What goes over the wire between a rank and the store.
//!
//! A message is a head in JSON and a body of raw bytes, each behind its length in bytes (little
//! endian, `u32` and `u64`). A connection starts with [`Request::Hello`]; then every request gets
//! one reply, in order.

use super::Failure;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{BufWriter, Error, ErrorKind, Read, Result, Write};

/// The first word of a connection: who speaks something else is turned away.
pub const MAGIC: &str = "shardc store 1";

/// The longest head; every one is shorter by far, unless the other side speaks something else.
const HEAD_BYTES: u32 = 1 << 20;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// The heartbeat. When it breaks off, the rank is gone.
    Life,
    /// Values and waits.
    Values,
}

/// What a rank asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Who speaks.
    Hello { magic: String, rank: u64, ranks: u64, who: String, purpose: Purpose },
    /// Puts the body under a key.
    Set { key: String },
    /// Waits for a key's value; `take` removes it.
    Get { key: String, take: bool, wait_ms: u64 },
    /// Removes all keys that start so.
    Remove { prefix: String },
    /// Gives the body, and waits for what every rank gives.
    Gather { name: String, wait_ms: u64 },
    /// Still alive, and where; perhaps a failure of this rank.
    Beat { at: String, failure: Option<Failure> },
    /// Leaves in peace.
    Bye,
}

/// What the store answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done; for a `Get`, the body is the value.
    Done,
    /// The body is all ranks' values, one after the other, of these lengths.
    Values { lengths: Vec<u64> },
    /// It did not come in time; these ranks were missing.
    TimedOut { missing: Vec<u64> },
    /// A rank failed.
    Failed(Failure),
    /// To a heartbeat: the first failure, and whether the run is to stop after the step.
    Beat { failure: Option<Failure>, stop: bool },
    /// Not this rank, or not this request.
    Refused(String),
}

/// Sends one message.
pub fn send(to: &mut impl Write, head: &impl Serialize, body: &[u8]) -> Result<()> {
    send_parts(to, head, &[body])
}

/// Sends one message whose body is all the parts, one after the other. Small parts are written together.
pub fn send_parts(to: &mut impl Write, head: &impl Serialize, parts: &[impl AsRef<[u8]>]) -> Result<()> {
    let (head, mut to) = (serde_json::to_vec(head)?, BufWriter::new(to));
    let bytes: u64 = parts.iter().map(|part| part.as_ref().len() as u64).sum();
    to.write_all(&(head.len() as u32).to_le_bytes())?;
    to.write_all(&bytes.to_le_bytes())?;
    to.write_all(&head)?;
    parts.iter().try_for_each(|part| to.write_all(part.as_ref()))?;
    to.flush()
}

/// Receives one message.
///
/// # Errors
/// A connection that ends or is silent for too long; bytes that are no message.
pub fn receive<T: DeserializeOwned>(from: &mut impl Read) -> Result<(T, Vec<u8>)> {
    let (mut head_bytes, mut body_bytes) = ([0; 4], [0; 8]);
    from.read_exact(&mut head_bytes)?;
    from.read_exact(&mut body_bytes)?;
    let (head_bytes, body_bytes) = (u32::from_le_bytes(head_bytes), u64::from_le_bytes(body_bytes));
    if head_bytes > HEAD_BYTES {
        return Err(Error::new(ErrorKind::InvalidData, "the other side does not speak the store's protocol"));
    }
    let mut head = vec![0; head_bytes as usize];
    from.read_exact(&mut head)?;
    // Grows as bytes come, so that a wrong length takes no memory.
    let mut body = Vec::new();
    from.take(body_bytes).read_to_end(&mut body)?;
    if body.len() as u64 != body_bytes {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((serde_json::from_slice(&head)?, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_as_they_went() {
        let mut wire = Vec::new();
        let set = Request::Set { key: "nccl/0".into() };
        send(&mut wire, &set, &[7; 128]).unwrap();
        let reply = Reply::Values { lengths: vec![2, 0, 1 << 20] };
        send_parts(&mut wire, &reply, &[vec![1, 2], vec![], vec![3; 1 << 20]]).unwrap();
        send(&mut wire, &Request::Bye, &[]).unwrap();
        let mut wire = wire.as_slice();
        assert_eq!(receive::<Request>(&mut wire).unwrap(), (set, vec![7; 128]));
        assert_eq!(receive::<Reply>(&mut wire).unwrap(), (reply, [&[1, 2][..], &[3; 1 << 20]].concat()));
        assert_eq!(receive::<Request>(&mut wire).unwrap(), (Request::Bye, vec![]));
        assert_eq!(receive::<Request>(&mut wire).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let check = |bytes: &[u8]| receive::<Request>(&mut &*bytes).unwrap_err().kind();
        assert_eq!(check(b"GET / HTTP/1.1\r\n\r\n"), ErrorKind::InvalidData);
        let mut cut = Vec::new();
        send(&mut cut, &Request::Bye, &[1, 2, 3]).unwrap();
        cut.pop();
        assert_eq!(check(&cut), ErrorKind::UnexpectedEof);
    }
}
