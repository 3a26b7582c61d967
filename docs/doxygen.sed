# What Doxygen reads instead of a header: our comments, in its form.
# The first comment of a file is the file's manual.
1s#^// (.*)#/// \\file\n/// \1#
# Examples and drawings, which are indented further than text.
s#^( *)//   (.*)#\1///      \2#
# Behind a declaration, and below such a comment.
s#([,;{])  // #\1  ///< #
s#^( {12,})// #\1///< #
# A header's name in running text is no tag.
/^ *\/\/ [^ ]/s#<([a-z_]+)>#\&lt;\1\&gt;#g
# Above a declaration.
s#^( *)//( |$)#\1///\2#
