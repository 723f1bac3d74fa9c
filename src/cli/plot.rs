//! `zspace log --plot`: stored size, change by layer and loss over the versions, as a picture.

use super::log::short;
use super::natural::natural;
use super::show;
use super::signals::Stop;
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{Diff, Facts, Numbered, Store};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Pixels: the picture's width, and where axes begin and end.
const WIDTH: u32 = 1100;
const LEFT: i32 = 230;
const RIGHT: i32 = 980;
/// Pixels that a panel with an axis takes, the title, what is around the rows of the map, and a row of it.
const PANEL: u32 = 250;
const TITLE: u32 = 46;
const AROUND: i32 = 84;
const ROW: (i32, i32) = (4, 16);
/// Rows are at most as high as makes a map of so many pixels.
const MAP: i32 = 640;
/// The font, and sizes of headings and labels.
const FONT: &str = "sans-serif";
const HEADING: i32 = 17;
const LABEL: i32 = 12;
/// From little to much change (ColorBrewer's YlGnBu).
const SHADES: [RGBColor; 7] = [
    RGBColor(255, 255, 217),
    RGBColor(199, 233, 180),
    RGBColor(127, 205, 187),
    RGBColor(65, 182, 196),
    RGBColor(29, 145, 192),
    RGBColor(34, 94, 168),
    RGBColor(12, 44, 132),
];
const UNKNOWN: RGBColor = RGBColor(225, 225, 225);
const BARS: RGBColor = RGBColor(34, 94, 168);
const LINES: [(&str, RGBColor); 2] = [
    ("loss", RGBColor(200, 60, 30)),
    ("eval_loss", RGBColor(60, 130, 60)),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A version as it is drawn.
struct Column {
    /// What stands below it.
    name: String,
    stored: u64,
    facts: Facts,
    /// How much each layer changed since the version before: ‖b − a‖ / ‖a‖; nothing where that is not known.
    change: BTreeMap<String, Option<f64>>,
}

/// Draws versions, the oldest first, into a file. Both of each pair are read for it, the first time.
///
/// # Errors
/// `NotFound` if there is nothing to draw; `Exists` if the file is there and is no picture; damage.
pub(super) fn draw(store: &Store, branch: &str, versions: &[Arc<Numbered>], path: &Path) -> Result<()> {
    if versions.is_empty() {
        return Err(Error::new(Kind::NotFound, "there is no version to draw"));
    }
    if let Ok(old) = std::fs::read(path)
        && !old.starts_with(b"<svg")
    {
        let why = format!(
            "{} is there and is no such picture: name another file",
            path.display()
        );
        return Err(Error::new(Kind::Exists, why));
    }
    let columns = columns(store, versions)?;
    let mut layers: Vec<String> = columns.iter().flat_map(|c| c.change.keys().cloned()).collect();
    layers.sort_by_key(|name| natural(name));
    layers.dedup();
    let mut text = String::new();
    picture(&mut text, branch, &columns, &layers)
        .map_err(|e| Error::new(Kind::Io, format!("draw {}: {e}", path.display())))?;
    std::fs::write(path, text).doing(|| path.display().to_string())
}

fn columns(store: &Store, versions: &[Arc<Numbered>]) -> Result<Vec<Column>> {
    let stop = Stop::on_signals()?;
    let bar = show::counting_bar("plot");
    bar.set_length(versions.len() as u64);
    let mut columns: Vec<Column> = Vec::new();
    for version in versions {
        stop.check()?;
        let before = version.version.parents.first().and_then(|id| store.version(id));
        let change = match before {
            Some(before) => by_layer(&store.kept_diff(&before, version)?),
            None => BTreeMap::new(),
        };
        columns.push(Column {
            name: version.number.to_string(),
            stored: version.stored,
            facts: store.facts(version)?,
            change,
        });
        bar.inc(1);
    }
    bar.finish_and_clear();
    let steps: Option<Vec<f64>> = columns.iter().map(|c| c.facts.step).collect();
    if let Some(steps) = steps.filter(|s| s.is_sorted_by(|a, b| a < b)) {
        columns
            .iter_mut()
            .zip(steps)
            .for_each(|(c, step)| c.name = short(step));
    }
    Ok(columns)
}

/// Puts the tensors of each layer together. The optimizer's are left out: they are no layers.
fn by_layer(diff: &Diff) -> BTreeMap<String, Option<f64>> {
    let mut sums: BTreeMap<String, Option<(f64, f64)>> = BTreeMap::new();
    let optimizers = |name: &str| name.starts_with("optim") || name.starts_with("state/");
    for tensor in diff.tensors.iter().filter(|t| !optimizers(&t.name)) {
        let sum = sums.entry(layer(&tensor.name)).or_insert(Some((0.0, 0.0)));
        *sum = match (tensor.relative_norm, *sum) {
            (Some(n), Some((moved, norm))) => Some((moved + n * n * tensor.norm, norm + tensor.norm)),
            _ => None,
        };
    }
    let share = |(moved, norm): (f64, f64)| if moved == 0.0 { 0.0 } else { (moved / norm).sqrt() };
    sums.into_iter()
        .map(|(name, sum)| (name, sum.map(share)))
        .collect()
}

/// The layer that a tensor belongs to: its name up to the first number in it, else up to its last part.
fn layer(name: &str) -> String {
    let mut end = 0;
    for part in name.split_inclusive(['.', '/']) {
        end += part.len();
        let bare = part.trim_end_matches(['.', '/']);
        if !bare.is_empty() && bare.bytes().all(|b| b.is_ascii_digit()) {
            return name[..end].trim_end_matches(['.', '/']).to_owned();
        }
    }
    name.rsplit_once(['.', '/']).map_or(name, |n| n.0).to_owned()
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn picture(text: &mut String, branch: &str, columns: &[Column], layers: &[String]) -> Drawn {
    let row = (MAP / layers.len().max(1) as i32).clamp(ROW.0, ROW.1);
    let map = match layers.is_empty() {
        true => 0,
        false => (row * layers.len() as i32 + AROUND) as u32,
    };
    let lines: Vec<_> = LINES
        .iter()
        .filter(|(name, _)| columns.iter().any(|c| value(c, name).is_some()))
        .collect();
    let loss = if lines.is_empty() { 0 } else { PANEL };
    let area = SVGBackend::with_string(text, (WIDTH, TITLE + PANEL + map + loss)).into_drawing_area();
    area.fill(&WHITE)?;
    let stored: u64 = columns.iter().map(|c| c.stored).sum();
    let title = format!(
        "{branch}: {} versions, {} stored",
        columns.len(),
        show::bytes(stored)
    );
    area.draw(&Text::new(title, (16, 14), (FONT, 22)))?;
    let (_, rest) = area.split_vertically(TITLE);
    let (top, rest) = rest.split_vertically(PANEL);
    bars(&top, columns)?;
    let (middle, bottom) = rest.split_vertically(map);
    if map > 0 {
        heat(&middle, columns, layers, row)?;
    }
    if loss > 0 {
        curves(&bottom, columns, &lines)?;
    }
    area.present()?;
    Ok(())
}

fn value(column: &Column, name: &str) -> Option<f64> {
    match name {
        "loss" => column.facts.loss,
        name => column.facts.all.get(name).copied(),
    }
}

/// What the columns are called.
fn axis(columns: &[Column]) -> &'static str {
    match columns
        .iter()
        .all(|c| c.facts.step.is_some_and(|s| short(s) == c.name))
    {
        true => "step",
        false => "version",
    }
}

/// Where a column's middle is.
fn middle(i: usize, columns: &[Column]) -> i32 {
    let width = f64::from(RIGHT - LEFT) / columns.len() as f64;
    LEFT + ((i as f64 + 0.5) * width) as i32
}

fn label(size: i32, h: HPos, v: VPos) -> TextStyle<'static> {
    TextStyle::from((FONT, size).into_font()).pos(Pos::new(h, v))
}

/// Names below columns, as many as there is room for, and what they are.
fn names(area: &Area<'_>, columns: &[Column], y: i32) -> Drawn {
    let longest = columns.iter().map(|c| c.name.len()).max().unwrap_or(1) as i32;
    let room = ((RIGHT - LEFT) / (longest * LABEL * 2 / 3 + 10)).max(1) as usize;
    let every = columns.len().div_ceil(room);
    let style = label(LABEL, HPos::Center, VPos::Top);
    for (i, column) in columns.iter().enumerate().step_by(every) {
        area.draw(&Text::new(
            column.name.clone(),
            (middle(i, columns), y),
            style.clone(),
        ))?;
    }
    let at = ((LEFT + RIGHT) / 2, y + LABEL + 6);
    area.draw(&Text::new(axis(columns), at, style))?;
    Ok(())
}

/// An axis with round numbers from 0, or from below the least, up to above the most: where they are, as shares of its length.
fn ticks(least: f64, most: f64) -> (f64, f64, Vec<f64>) {
    let span = if most > least {
        most - least
    } else {
        most.abs().max(1e-9)
    };
    let raw = span / 4.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .map(|n| n * power)
        .into_iter()
        .find(|s| *s >= raw);
    let step = step.unwrap_or(raw);
    let (from, to) = ((least / step).floor() * step, (most / step).ceil() * step);
    let to = if to > from { to } else { from + step };
    let count = ((to - from) / step).round() as usize;
    (from, to, (0..=count).map(|n| from + n as f64 * step).collect())
}

/// A heading, an axis at the left with its lines across, and where a value is.
fn frame(
    area: &Area<'_>,
    heading: &str,
    (least, most): (f64, f64),
    shown: &dyn Fn(f64) -> String,
) -> std::result::Result<impl Fn(f64) -> i32, Box<dyn std::error::Error>> {
    let (top, bottom) = (40, PANEL as i32 - 56);
    let (from, to, ticks) = ticks(least, most);
    let y = move |v: f64| bottom - ((v - from) / (to - from) * f64::from(bottom - top)) as i32;
    area.draw(&Text::new(heading.to_owned(), (16, 8), (FONT, HEADING)))?;
    for tick in ticks {
        area.draw(&PathElement::new(
            vec![(LEFT, y(tick)), (RIGHT, y(tick))],
            RGBColor(215, 215, 215),
        ))?;
        let style = label(LABEL, HPos::Right, VPos::Center);
        area.draw(&Text::new(shown(tick), (LEFT - 8, y(tick)), style))?;
    }
    Ok(y)
}

fn bars(area: &Area<'_>, columns: &[Column]) -> Drawn {
    let most = columns.iter().map(|c| c.stored).max().unwrap_or(0) as f64;
    let bytes = |v: f64| show::bytes(v as u64);
    let y = frame(
        area,
        "Bytes that each version added to the store",
        (0.0, most),
        &bytes,
    )?;
    let half = (f64::from(RIGHT - LEFT) / columns.len() as f64 * 0.4).max(0.5) as i32;
    for (i, column) in columns.iter().enumerate() {
        let x = middle(i, columns);
        let bar = [(x - half, y(column.stored as f64)), (x + half.max(1), y(0.0))];
        area.draw(&Rectangle::new(bar, BARS.filled()))?;
    }
    names(area, columns, PANEL as i32 - 48)
}

fn heat(area: &Area<'_>, columns: &[Column], layers: &[String], row: i32) -> Drawn {
    let heading = "Change by layer since the version before: |b-a| / |a|";
    area.draw(&Text::new(heading, (16, 8), (FONT, HEADING)))?;
    let known = columns.iter().flat_map(|c| c.change.values().flatten());
    let moved: Vec<f64> = known.copied().filter(|n| *n > 0.0).collect();
    let least = moved
        .iter()
        .copied()
        .fold(f64::INFINITY, f64::min)
        .log10()
        .floor();
    let most = moved.iter().copied().fold(0.0, f64::max).log10().ceil();
    let (least, most) = match least.is_finite() && most > least {
        true => (least, most),
        false => (-4.0, 0.0),
    };
    let top = 36;
    let width = f64::from(RIGHT - LEFT) / columns.len() as f64;
    let every = (LABEL + 1).div_euclid(row).max(1) as usize;
    for (n, name) in layers.iter().enumerate() {
        let y = top + n as i32 * row;
        if n % every == 0 {
            let tail: String = name
                .chars()
                .rev()
                .take(32)
                .collect::<Vec<_>>()
                .into_iter()
                .rev()
                .collect();
            let style = label(LABEL.min(row.max(9)), HPos::Right, VPos::Center);
            area.draw(&Text::new(tail, (LEFT - 8, y + row / 2), style))?;
        }
        for (i, column) in columns.iter().enumerate() {
            let colour = match column.change.get(name) {
                Some(Some(n)) if *n > 0.0 => shade((n.log10() - least) / (most - least)),
                Some(Some(_)) => WHITE,
                _ => UNKNOWN,
            };
            let x = LEFT + (i as f64 * width) as i32;
            let end = LEFT + ((i + 1) as f64 * width) as i32;
            area.draw(&Rectangle::new([(x, y), (end, y + row)], colour.filled()))?;
        }
    }
    let bottom = top + layers.len() as i32 * row;
    let edge = [(LEFT, top), (RIGHT, bottom)];
    area.draw(&Rectangle::new(edge, RGBColor(120, 120, 120)))?;
    legend(area, top, least, most)?;
    names(area, columns, bottom + 6)
}

fn shade(share: f64) -> RGBColor {
    let at = share.clamp(0.0, 1.0) * (SHADES.len() - 1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    let (a, b, t) = (SHADES[low], SHADES[high], at.fract());
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * t) as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// What the shades mean.
fn legend(area: &Area<'_>, top: i32, least: f64, most: f64) -> Drawn {
    let x = RIGHT + 16;
    let style = label(LABEL, HPos::Left, VPos::Center);
    let powers: Vec<i32> = (least as i32..=most as i32).rev().collect();
    let every = powers.len().div_ceil(6);
    let mut rows: Vec<(RGBColor, String)> = powers
        .into_iter()
        .step_by(every)
        .map(|p| (shade((f64::from(p) - least) / (most - least)), format!("1e{p}")))
        .collect();
    rows.push((WHITE, "unchanged".to_owned()));
    rows.push((UNKNOWN, "not known".to_owned()));
    for (n, (colour, text)) in rows.into_iter().enumerate() {
        let y = top + n as i32 * 18;
        let swatch = [(x, y), (x + 14, y + 14)];
        area.draw(&Rectangle::new(swatch, colour.filled()))?;
        area.draw(&Rectangle::new(swatch, RGBColor(120, 120, 120)))?;
        area.draw(&Text::new(text, (x + 20, y + 7), style.clone()))?;
    }
    Ok(())
}

fn curves(area: &Area<'_>, columns: &[Column], lines: &[&(&str, RGBColor)]) -> Drawn {
    let values = || {
        lines
            .iter()
            .flat_map(|(name, _)| columns.iter().filter_map(move |c| value(c, name)))
    };
    let least = values().fold(f64::INFINITY, f64::min);
    let most = values().fold(f64::NEG_INFINITY, f64::max);
    let y = frame(area, "Loss, as the checkpoints say", (least, most), &short)?;
    for (n, (name, colour)) in lines.iter().enumerate() {
        let points: Vec<(i32, i32)> = columns
            .iter()
            .enumerate()
            .filter_map(|(i, c)| Some((middle(i, columns), y(value(c, name)?))))
            .collect();
        area.draw(&PathElement::new(points.clone(), colour.stroke_width(2)))?;
        for point in points {
            area.draw(&Circle::new(point, 3, colour.filled()))?;
        }
        let at = (RIGHT + 16, 48 + n as i32 * 20);
        area.draw(&Circle::new(at, 4, colour.filled()))?;
        let style = label(LABEL, HPos::Left, VPos::Center);
        area.draw(&Text::new(name.replace('_', " "), (at.0 + 10, at.1), style))?;
    }
    names(area, columns, PANEL as i32 - 48)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_put_together_by_layer() {
        for (name, want) in [
            ("model/layers.10.attn.wq.weight", "model/layers.10"),
            ("h.3.ln.weight", "h.3"),
            ("tok_emb.weight", "tok_emb"),
            ("weight", "weight"),
            ("model/state/0/x", "model/state/0"),
        ] {
            assert_eq!(layer(name), want);
        }
    }

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!(
            ticks(0.0, 870.0),
            (0.0, 1000.0, vec![0.0, 250.0, 500.0, 750.0, 1000.0])
        );
        let (from, to, ticks) = ticks(2.0, 2.0);
        assert!(from <= 2.0 && to > 2.0 && ticks.len() > 1);
    }
}
