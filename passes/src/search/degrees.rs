//! How many ways each kind of parallelism divides the step: what the mesh and the text of a choice
//! follow from.

use shardc_ir::{AxisKind, Mesh};

/// The families of axes over ranks, outermost first: neighbours in the mesh are near in the cluster, so
/// what talks most is innermost.
pub const FAMILIES: [&str; 8] = ["pp", "dp", "fsdp", "ep", "ring", "ulysses", "cp", "tp"];

/// Families that a choice names even where they have one coordinate.
const ALWAYS_NAMED: [&str; 2] = ["dp", "tp"];

/// The degrees of one candidate; a family that is not given has one coordinate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Degrees {
    /// Per family of [`FAMILIES`], the sizes of its axes, none of size 1.
    sizes: [Vec<u64>; FAMILIES.len()],
    /// Sequences per data rank per microbatch.
    pub microbatch: u64,
}

impl Degrees {
    /// One rank that runs microbatches of so many sequences.
    pub fn new(microbatch: u64) -> Self {
        Self { sizes: Default::default(), microbatch }
    }

    /// The same with a family divided over axes of these sizes.
    pub fn with(mut self, family: &str, sizes: &[u64]) -> Self {
        if let Some(index) = FAMILIES.iter().position(|known| *known == family) {
            self.sizes[index] = sizes.iter().copied().filter(|size| *size > 1).collect();
        }
        self
    }

    /// The sizes of a family's axes.
    pub fn sizes(&self, family: &str) -> &[u64] {
        FAMILIES.iter().position(|known| *known == family).map_or(&[], |index| &self.sizes[index])
    }

    /// The coordinates of a family, over all of its axes.
    pub fn degree(&self, family: &str) -> u64 {
        self.sizes(family).iter().product()
    }

    /// How many axes over ranks the mesh has.
    pub fn axes(&self) -> usize {
        self.sizes.iter().map(Vec::len).sum()
    }

    /// The ranks among which the batch is divided.
    pub fn data(&self) -> u64 {
        ["dp", "fsdp", "ep"].iter().map(|family| self.degree(family)).product()
    }

    /// The microbatches of a step of so many sequences.
    pub fn microbatches(&self, batch: u64) -> u64 {
        batch / (self.data() * self.microbatch)
    }

    /// The mesh, without axes of one coordinate: the families, and the microbatches inside the data axes,
    /// since they divide each data rank's sequences.
    pub fn mesh(&self, batch: u64) -> Mesh {
        let mut mesh = Mesh::default();
        for (family, sizes) in FAMILIES.iter().zip(&self.sizes) {
            for (index, size) in sizes.iter().enumerate() {
                let name = if index == 0 { family.to_string() } else { format!("{family}_{index}") };
                mesh.push(name, *size, AxisKind::Space);
            }
            let microbatches = self.microbatches(batch);
            if *family == "fsdp" && microbatches > 1 {
                mesh.push("mb", microbatches, AxisKind::Time);
            }
        }
        mesh
    }

    /// The degrees as pins would say them: `dp=2,tp=4`, or `tp=2x2` over two axes.
    pub fn text(&self) -> String {
        let named = FAMILIES.iter().filter(|family| self.degree(family) > 1 || ALWAYS_NAMED.contains(family));
        let text = |family: &&str| match self.sizes(family) {
            [] => format!("{family}=1"),
            sizes => format!("{family}={}", sizes.iter().map(u64::to_string).collect::<Vec<_>>().join("x")),
        };
        named.map(text).collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mesh_and_the_text_follow() {
        let degrees = Degrees::new(2).with("dp", &[4]).with("tp", &[2, 2]);
        assert_eq!(degrees.text(), "dp=4,tp=2x2");
        assert_eq!(degrees.mesh(32).to_string(), "dp=4,time mb=4,tp=2,tp_1=2");
        assert_eq!(degrees.clone().with("pp", &[3]).text(), "pp=3,dp=4,tp=2x2");
        let hybrid = Degrees::new(1).with("dp", &[2]).with("fsdp", &[4]).with("cp", &[3]);
        assert_eq!((hybrid.text().as_str(), hybrid.data()), ("dp=2,fsdp=4,cp=3,tp=1", 8));
        assert_eq!(hybrid.mesh(16).to_string(), "dp=2,fsdp=4,time mb=2,cp=3");
        assert_eq!(Degrees::new(2).with("dp", &[1]).mesh(2).to_string(), "");
    }
}
