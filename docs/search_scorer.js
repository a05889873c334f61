/* How search results are ordered: Sphinx's weights, and more for pages whose title has the words of the query. Without
   it all pages with one of the words in their title have equal scores, and the first by the alphabet wins; and attributes
   that are called as a query of one word come before the page about it. Terms of the glossary, which Sphinx puts first,
   come after these pages and before those whose text has the words. */
var Scorer = {
  score: ([, title, anchor, , score]) => {
    const query = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().trim();
    const words = query.split(/\s+/);
    const name = title.toLowerCase();
    const inTitle = words.every((word) => name.includes(word));
    if ((anchor || "").startsWith("#term-")) return Math.min(score, 60);
    if (!inTitle || (words.length < 2 && (anchor || name.includes(".")))) return score;
    return score + 30 + (name.includes(query) ? 30 : 0) - name.length / 100;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
