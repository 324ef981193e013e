//! What of a tree is drawn: devices that are alike are one, with how many they are; what is held or unhealthy stands alone.

use super::{Kind, Leaf, Part, Picture};

/// So many virtual functions of one card are drawn one by one.
const FUNCTIONS_MAX: usize = 4;
/// So many other devices that are alike are drawn one by one, in one place.
const DEVICES_MAX: usize = 16;
/// So many of a crowd stand alone because they are held or unhealthy.
const ALONE_MAX: usize = 8;

/// What is drawn of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figure {
    /// Its parts.
    pub parts: Vec<Shown>,
}

/// Something that is drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shown {
    /// A place, and what is in it.
    Group {
        /// What it is: `NUMA node 0`, or `host bridge 0000:15 · switch 0000:16:00.0` where the one has nothing but the other.
        title: String,
        /// What is in it.
        parts: Vec<Shown>,
    },
    /// A device, and its parts.
    Device {
        /// The device.
        leaf: Box<Leaf>,
        /// What is of it.
        parts: Vec<Shown>,
    },
    /// Devices that are alike.
    Alike(Alike),
}

/// Devices that are drawn as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alike {
    /// How many they are, without those that stand alone beside them.
    pub count: usize,
    /// What they are: `rdma vf`.
    pub kind: String,
    /// The first and the last by name.
    pub range: (String, String),
    /// The resources that offer them.
    pub resources: Vec<String>,
    /// Whether all of them are known to be healthy.
    pub is_healthy: bool,
    /// How many of them are unhealthy: more than can stand alone.
    pub unhealthy: usize,
    /// How many of them are held.
    pub held: usize,
}

impl Alike {
    /// How they are, in words; `None` where nothing is known.
    #[must_use]
    pub fn state(&self) -> Option<String> {
        match self.unhealthy {
            0 => self.is_healthy.then(|| "healthy".to_owned()),
            unhealthy => Some(format!("{unhealthy} unhealthy")),
        }
    }
}

/// Makes a tree into what is drawn of it; with `all` every device stands alone.
#[must_use]
pub fn fold(picture: &Picture, all: bool) -> Figure {
    Figure { parts: shown(&picture.parts, all) }
}

fn shown(parts: &[Part], all: bool) -> Vec<Shown> {
    let mut drawn: Vec<Shown> = Vec::new();
    let mut rest = parts;
    while let [part, ..] = rest {
        let alike = rest.iter().take_while(|other| is_like(part, other)).count();
        let (these, others) = rest.split_at(alike.max(1));
        rest = others;
        let max = if part.device.as_ref().is_some_and(|leaf| leaf.is_vf) { FUNCTIONS_MAX } else { DEVICES_MAX };
        if all || these.len() <= max {
            drawn.extend(these.iter().map(|part| one(part, all)));
        } else {
            drawn.extend(crowd(these, all));
        }
    }
    drawn
}

fn one(part: &Part, all: bool) -> Shown {
    match &part.device {
        Some(leaf) => Shown::Device { leaf: Box::new(leaf.clone()), parts: shown(&part.parts, all) },
        None => {
            let (mut title, mut part) = (title(part), part);
            // A host bridge that has nothing but a switch is that switch's.
            while let [only] = part.parts.as_slice()
                && part.kind != Kind::NumaNode
                && only.kind != Kind::Device
            {
                title = format!("{title} · {}", self::title(only));
                part = only;
            }
            Shown::Group { title, parts: shown(&part.parts, all) }
        }
    }
}

fn title(part: &Part) -> String {
    let what = part.kind.in_words();
    let named = match (&part.name, part.kind) {
        (Some(name), _) => format!("{what} {name}"),
        (None, Kind::NumaNode) => format!("{what} not told"),
        (None, _) => what.to_owned(),
    };
    part.cpus.as_ref().map_or(named.clone(), |cpus| format!("{named}, processors {cpus}"))
}

/// Devices that differ in nothing that would be drawn. What has parts of its own stands alone.
fn is_like(a: &Part, b: &Part) -> bool {
    let (Some(one), Some(other)) = (&a.device, &b.device) else { return false };
    let of = |leaf: &Leaf| (leaf.kind(), leaf.resources.clone(), leaf.model.clone());
    a.parts.is_empty() && b.parts.is_empty() && of(one) == of(other)
}

fn crowd(parts: &[Part], all: bool) -> Vec<Shown> {
    let stands_out = |part: &&Part| part.device.as_ref().is_some_and(|leaf| leaf.is_unhealthy() || !leaf.holders.is_empty());
    // What is wrong comes before what is in use.
    let (bad, used): (Vec<&Part>, Vec<&Part>) =
        parts.iter().filter(stands_out).partition(|part| part.device.as_ref().is_some_and(Leaf::is_unhealthy));
    let alone: Vec<&Part> = bad.into_iter().chain(used).take(ALONE_MAX).collect();
    let crowd: Vec<&Leaf> = parts.iter().filter(|part| !alone.contains(part)).filter_map(|part| part.device.as_ref()).collect();
    let mut drawn: Vec<Shown> = alone.iter().map(|part| one(part, all)).collect();
    if let (Some(first), Some(last)) = (crowd.first(), crowd.last()) {
        drawn.push(Shown::Alike(Alike {
            count: crowd.len(),
            kind: first.kind(),
            range: (first.name(), last.name()),
            resources: first.resources.clone(),
            is_healthy: crowd.iter().all(|leaf| leaf.health == Some("Healthy")),
            unhealthy: crowd.iter().filter(|leaf| leaf.is_unhealthy()).count(),
            held: crowd.iter().filter(|leaf| !leaf.holders.is_empty()).count(),
        }));
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::super::testing::{holder, machine, node};
    use super::super::{Cpus, tree};
    use super::*;

    fn crowd_of(parts: &[Shown]) -> Option<&Alike> {
        parts.iter().find_map(|part| match part {
            Shown::Alike(alike) => Some(alike),
            Shown::Group { parts, .. } | Shown::Device { parts, .. } => crowd_of(parts),
        })
    }

    #[test]
    fn functions_that_are_alike_are_one_and_the_one_that_is_held_stands_beside_them() {
        let picture = tree(machine(), &Cpus::new());
        let figure = fold(&picture, false);
        let crowd = crowd_of(&figure.parts).unwrap();
        assert_eq!((crowd.count, crowd.kind.as_str(), crowd.held, crowd.state()), (63, "rdma vf", 0, None));
        assert_eq!(crowd_of(&fold(&picture, true).parts), None);
        let Shown::Group { parts, .. } = &figure.parts[0] else { unreachable!() };
        let Shown::Group { title, .. } = &parts[0] else { unreachable!() };
        assert_eq!(title, "host bridge 0000:15 · switch 0000:16:00.0");
    }

    #[test]
    fn of_a_crowd_the_broken_stand_alone_first_and_no_more_than_can_be_read() {
        let leaf = |n: usize| {
            let leaf = Leaf { health: Some("Healthy"), ..node(&format!("/dev/x{n:03}")) };
            match n {
                0..100 => Leaf { holders: vec![holder("p")], ..leaf },
                100..103 => Leaf { health: Some("Unhealthy"), ..leaf },
                _ => leaf,
            }
        };
        let figure = fold(&tree((0..300).map(leaf), &Cpus::new()), false);
        let Shown::Group { parts, .. } = &figure.parts[0] else { unreachable!() };
        assert_eq!(parts.len(), ALONE_MAX + 1);
        assert!(matches!(&parts[0], Shown::Device { leaf, .. } if leaf.is_unhealthy()));
        let crowd = crowd_of(parts).unwrap();
        assert_eq!((crowd.count, crowd.held, crowd.unhealthy), (292, 95, 0));
        assert_eq!(crowd.state().as_deref(), Some("healthy"));
    }
}
