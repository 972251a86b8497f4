//! Lines on two logarithmic axes, as one SVG file.

use std::fmt::Write;

/// A line with its points.
#[derive(Clone, Debug)]
pub struct Line {
    /// What it shows.
    pub name: String,
    /// Points, both coordinates above 0.
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 320.0;
const MARGIN: f64 = 60.0;
const COLOURS: [&str; 4] = ["#1f6feb", "#d1242f", "#1a7f37", "#8250df"];

/// Panels beside each other, each with a title and the name of its horizontal axis; all show seconds.
pub fn svg(panels: &[(&str, &str, Vec<Line>)]) -> String {
    let width = (WIDTH + MARGIN) * panels.len() as f64 + MARGIN;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {}\" font-family=\"sans-serif\" font-size=\"12\">\n",
        HEIGHT + 2.0 * MARGIN
    );
    for (index, (title, axis, lines)) in panels.iter().enumerate() {
        panel(&mut text, MARGIN + index as f64 * (WIDTH + MARGIN), title, axis, lines);
    }
    text + "</svg>\n"
}

fn panel(text: &mut String, left: f64, title: &str, axis: &str, lines: &[Line]) {
    let all = || lines.iter().flat_map(|line| line.points.iter().copied());
    let horizontal = Axis::over(all().map(|point| point.0), 2.0, left, WIDTH);
    let vertical = Axis::over(all().map(|point| point.1), 10.0, MARGIN + HEIGHT, -HEIGHT);
    let _ = writeln!(text, "<text x=\"{left}\" y=\"{}\" font-size=\"15\">{title}</text>", MARGIN - 20.0);
    for tick in horizontal.ticks() {
        let (x, bottom) = (horizontal.place(tick), MARGIN + HEIGHT);
        let _ = writeln!(text, "<path d=\"M{x:.1} {MARGIN}V{bottom}\" stroke=\"#ddd\"/>");
        let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{tick}</text>", bottom + 18.0);
    }
    for tick in vertical.ticks() {
        let y = vertical.place(tick);
        let _ = writeln!(text, "<path d=\"M{left} {y:.1}h{WIDTH}\" stroke=\"#ddd\"/>");
        let _ = writeln!(text, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{tick} s</text>", left - 6.0, y + 4.0);
    }
    let (middle, below) = (left + WIDTH / 2.0, MARGIN + HEIGHT + 38.0);
    let _ = writeln!(text, "<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{axis}</text>");
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let at = |(x, y): &(f64, f64)| (horizontal.place(*x), vertical.place(*y));
        let path: Vec<String> = line.points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(text, "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>", path.join(" "));
        for (x, y) in line.points.iter().map(at) {
            let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
        if let Some((x, y)) = line.points.last().map(at) {
            let _ = writeln!(
                text,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"{colour}\">{}</text>",
                x - 6.0,
                y - 8.0,
                line.name
            );
        }
    }
}

/// A logarithmic axis: from a power of `base` to one, over `length` pixels from `start`.
struct Axis {
    base: f64,
    low: i32,
    high: i32,
    start: f64,
    length: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, base: f64, start: f64, length: f64) -> Self {
        let powers = values.filter(|value| *value > 0.0).map(|value| value.log(base));
        let (low, high) =
            powers.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), power| (low.min(power), high.max(power)));
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        // Rounding must not add a power.
        let (low, high) = ((low + 1e-9).floor() as i32, (high - 1e-9).ceil() as i32);
        Self { base, low, high: high.max(low + 1), start, length }
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let base = self.base;
        (self.low..=self.high).map(move |power| base.powi(power))
    }

    fn place(&self, value: f64) -> f64 {
        let share = (value.log(self.base) - f64::from(self.low)) / f64::from(self.high - self.low);
        self.start + share * self.length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_lie_where_the_axes_say() {
        let axis = Axis::over([8.0, 1024.0].into_iter(), 2.0, 100.0, 70.0);
        assert_eq!(axis.ticks().collect::<Vec<_>>(), [8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0]);
        assert!((axis.place(8.0) - 100.0).abs() < 1e-9 && (axis.place(1024.0) - 170.0).abs() < 1e-9);
        let line = Line { name: "plans".into(), points: vec![(8.0, 0.1), (16.0, 1.0)] };
        let text = svg(&[("growth", "devices", vec![line])]);
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
        assert!(text.contains("<polyline points=\"60.0,380.0 480.0,60.0\""), "{text}");
    }
}
