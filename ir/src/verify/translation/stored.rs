//! Where slots lie: which buffers' contents the bytes of a slot are.

use crate::entity::BufferId;
use crate::plan::Space;
use crate::program::{Buffer, Program};
use std::collections::BTreeMap;

/// The places of a program's slots, which share no bytes, and the buffers that hold what is there.
#[derive(Clone, Debug, Default)]
pub(super) struct Stored {
    /// By where it begins: the byte behind its last one, and the buffers that have just these bytes.
    places: BTreeMap<(Space, u64), (u64, Vec<BufferId>)>,
}

impl Stored {
    /// Before the step: each slot's own buffer holds its bytes.
    pub fn of(program: &Program) -> Self {
        let place = |buffer: BufferId| {
            let home = &program.buffers[buffer];
            ((home.space, home.offset), (home.end(), vec![buffer]))
        };
        Self { places: program.slots.iter().map(|slot| place(slot.buffer)).collect() }
    }

    /// Whether a buffer shares bytes with a slot.
    pub fn touches(&self, buffer: &Buffer) -> bool {
        self.shared(buffer).next().is_some()
    }

    /// Whether a buffer has the bytes of a slot and no others.
    pub fn is_home(&self, buffer: &Buffer) -> bool {
        self.places.get(&(buffer.space, buffer.offset)).is_some_and(|(end, _)| *end == buffer.end())
    }

    /// A buffer was written: the slots whose bytes it has hold nothing else any more, unless it is a view.
    pub fn note(&mut self, id: BufferId, buffer: &Buffer, is_view: bool) {
        if !is_view {
            let written: Vec<(Space, u64)> = self.shared(buffer).collect();
            for place in written {
                self.places.entry(place).and_modify(|(_, holders)| holders.clear());
            }
        }
        if let Some((end, holders)) = self.places.get_mut(&(buffer.space, buffer.offset))
            && *end == buffer.end()
            && !holders.contains(&id)
        {
            holders.push(id);
        }
    }

    /// The buffers whose contents the bytes of a slot are.
    pub fn holders(&self, home: &Buffer) -> &[BufferId] {
        self.places.get(&(home.space, home.offset)).map_or(&[], |(_, holders)| holders)
    }

    /// The places that share bytes with a buffer.
    fn shared(&self, buffer: &Buffer) -> impl Iterator<Item = (Space, u64)> {
        let (space, start, end) = (buffer.space, buffer.offset, buffer.end());
        let before = self.places.range(..(space, start)).next_back();
        let from = self.places.range((space, start)..(space, end.max(start)));
        let shares =
            move |((of, at), (until, _)): &(&(Space, u64), &(u64, _))| *of == space && *at < end && start < *until;
        before.into_iter().chain(from).filter(shares).map(|(place, _)| *place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Category;
    use crate::program::Slot;
    use crate::types::{DType, TensorType};

    fn buffer(offset: u64, elements: u64) -> Buffer {
        let ty = TensorType::new(DType::F32, [elements]);
        Buffer { ty, space: Space::Device, offset, category: Category::Parameter, value: None }
    }

    #[test]
    fn what_is_written_over_a_part_of_a_slot_is_no_view_of_it() {
        let mut program = Program::default();
        let home = program.buffers.push(buffer(256, 128));
        let [covers, view, part, beside] =
            [buffer(0, 256), buffer(256, 128), buffer(512, 4), buffer(768, 4)].map(|of| program.buffers.push(of));
        program.slots.push(Slot {
            name: "w".to_string(),
            buffer: home,
            ty: TensorType::new(DType::F32, [128]),
            slice: vec![(0, 128)],
            is_parameter: true,
            init: 0.0,
            cast_of: None,
        });
        let of = |id: BufferId| &program.buffers[id];
        let mut stored = Stored::of(&program);
        assert_eq!(stored.holders(of(home)), [home]);
        assert!(stored.is_home(of(view)) && !stored.is_home(of(part)));
        assert!([covers, view, part].into_iter().all(|id| stored.touches(of(id))) && !stored.touches(of(beside)));
        stored.note(beside, of(beside), false);
        stored.note(view, of(view), true);
        assert_eq!(stored.holders(of(home)), [home, view]);
        stored.note(part, of(part), false);
        assert_eq!(stored.holders(of(home)), []);
        stored.note(home, of(home), false);
        stored.note(covers, of(covers), false);
        stored.note(view, of(view), true);
        assert_eq!(stored.holders(of(home)), [view]);
    }
}
